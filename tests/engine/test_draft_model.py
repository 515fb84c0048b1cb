"""Draft tokens of a small model: they are what the model itself would sample, and its cache keeps
what the text has come to.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from config import ConfigError, build
from generate.draft_model import DraftModel
from model import GPT2
from scheduling.inference import Inference, Iteration
from scheduling.policies import Dynamic
from scheduling.sampling import Sampling
from tests.oracle import MAX_TOKENS, engine, model, serve, workload  # noqa: F401

HOW = {
    "greedy": Sampling(),
    "drawn": Sampling(0.8, 40, 0.9),
    "with penalties": Sampling(1.0, frequency_penalty=1.5, min_tokens=5, stop_ids=(3, 7)),
}


@pytest.mark.parametrize("how", HOW)
def test_a_model_accepts_all_that_it_proposed_itself(model: GPT2, how: str) -> None:  # noqa: F811
    asks, server = workload(12, HOW[how]), engine(model, 80, 4)
    server.drafter = DraftModel(engine(model, 5 * 15, 4), 5, 15, max_tokens=16)
    serve(Dynamic(), server, asks, speculate="4")
    verified = sum(each.drafts.verified for each in asks)
    assert sum(each.drafts.accepted for each in asks) == verified > 60


def test_only_what_the_text_changed_is_computed_again(model: GPT2) -> None:  # noqa: F811
    computing, passes = engine(model, 2 * 15, 4), list[list[tuple[int, int]]]()
    drafter = DraftModel(computing, 2, 15, max_tokens=16)

    def proposed(*wanted: tuple[Inference, int]) -> tuple[list[list[int]], object]:
        passes.clear()
        return drafter.propose(wanted), passes

    def generate(iteration: Iteration) -> list[int]:
        passes.append([(row.start, row.n_tokens) for row in iteration.rows])
        return type(computing).generate(computing, iteration)

    computing.generate = generate  # type: ignore[method-assign]
    a, b, c = (Inference([n] * 20, 30, replace(HOW["drawn"], seed=n)) for n in range(3))
    a.tokens, b.tokens, c.tokens = [1], [2], [3]
    [drafts], _ = proposed((a, 3))
    assert passes == [[(0, 16)], [(16, 5)], [(21, 1)], [(22, 1)]], "the prompt, and two drafts"
    a.tokens += [*drafts, 9]
    [drafts, alone], _ = proposed((a, 3), (b, 1))
    assert passes[:2] == [[(23, 2), (0, 14)], [(25, 1), (14, 7)]] and len(alone) == 1
    assert passes[2:] == [[(26, 1)]], "a row that has its drafts is not computed"
    a.tokens += [drafts[0], drafts[1] + 1]
    proposed((a, 1))
    assert passes == [[(26, 1)]], "the first draft was right"
    a.tokens += [5]
    a.tokens.pop()
    proposed((a, 1))
    assert passes == [[(26, 1)]], "logits come of the last token in any case"
    proposed((c, 1))
    assert passes[0] == [(0, 16)], "in the place of b, which was not used for longest"
    proposed((a, 1))
    assert passes == [[(26, 1)]]
    proposed((b, 1))
    assert passes[0] == [(0, 16)]


def test_a_draft_model_is_found_from_anywhere_and_has_all_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 32, "vocab_size": 257, "n_positions": 512}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(sizes))
    monkeypatch.chdir(tmp_path)
    asked = {"model": "demo", "speculate": "4", "draft": "model:small", "max_model_len": "512"}
    config = build("dynamic", asked, {})
    draft = config.draft_model
    assert config.draft == f"model:{tmp_path / 'small'}" and draft is not None
    assert (draft.n_blocks, draft.shape.n_embd) == (32 * 32, 32)
    beyond = "max_model_len 1024 is beyond the 512 positions of .*small; lower it, or choose"
    with pytest.raises(ConfigError, match=beyond):
        build("dynamic", asked | {"max_model_len": "1024"}, {})
