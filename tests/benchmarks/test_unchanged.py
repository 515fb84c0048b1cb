"""What `benchmarks.unchanged` takes for the same: all but times, ids and how tokens
share events.
"""

from __future__ import annotations

from benchmarks.unchanged import IDS, TIMES, joined


def test_a_stream_is_its_texts_whatever_events_they_came_in() -> None:
    one = (
        'data: {"index":0,"text":"ab","tokens":2}\n\ndata: {"usage":{"total_tokens":3}}\n\ndata: '
        "[DONE]\n\n"
    )
    two = one.replace(
        '{"index":0,"text":"ab","tokens":2}',
        '{"index":0,"text":"a"}\n\ndata: {"index":0,"text":"b"}',
    )
    assert joined(one) == joined(two) != joined(one.replace("ab", "ac"))
    assert joined(one) != joined(one.replace("data: [DONE]\n\n", "")) and "total_tokens" in joined(
        one
    )
    chunks = (
        'data: {"choices":[{"index":1,"delta":{"content":"x"}}]}\n\ndata: '
        '{"choices":[{"index":1,"text":"y"}]}\n\n'
    )
    assert '{"1":"xy"}' in joined(chunks)


def test_times_and_ids_are_masked_and_nothing_else() -> None:
    answer = '{"id":"cmpl-7f","created":123,"timings":{"queue_s":0.5,"itl_s":[0.1,0.2]},"seed":7}'
    assert IDS.sub('"id":"…"', TIMES.sub("…", answer)) == '{"id":"…",…,"timings":{…,…},"seed":7}'
