"""Who goes first, and what that costs whom: virtual time, seeded.

    python -m studies.orders [--part orders|batches|fair|urgent] [--seeds 5] [--out DIR]

The server's own scheduler at the cost of `--model fake`. All variants of a case serve the same
traces, so differences are paired by seed.
"""

from __future__ import annotations

import multiprocessing

from studies.orders import batches, fair, orders, urgent
from studies.orders.tools import Part
from studies.runner import Study, over_seeds, parser_of, write

PARTS = {part.PART.study.name: part.PART for part in (orders, batches, fair, urgent)}


def study(part: Part, seeds: int, n: int, processes: int) -> list[dict[str, object]]:
    """Of each case what every seed's trace came to."""
    cases = part.cases()
    with multiprocessing.Pool(processes) as workers:
        results = over_seeds(workers, part.serve, [(case, n) for case in cases], seeds)
    return [case | {"seeds": of_seeds} for case, of_seeds in zip(cases, results)]


def main() -> None:
    everything = Study("studies.orders", "orders", "Who goes first", "")
    parser = parser_of(everything, "Who goes first, and what that costs whom.")
    parser.add_argument("--part", choices=PARTS, help="one of them (default: all)")
    defaults = ", ".join(f"{part.requests} {name}" for name, part in PARTS.items())
    parser.add_argument("--requests", type=int, help=f"of a trace (default: {defaults})")
    options = parser.parse_args()
    for part in [PARTS[options.part]] if options.part else PARTS.values():
        n = options.requests or part.requests
        found = study(part, options.seeds, n, options.processes)
        told_of = (
            f"{part.told_of.format(n=n)}; {options.seeds} seeds, virtual time at the cost of "
            "--model fake"
        )
        result = part.settings | {"cases": found, "requests": n}
        drawn = part.figure(found, told_of)
        write(part.study, options.out, told_of, part.tables(found), drawn, result)


if __name__ == "__main__":
    main()
