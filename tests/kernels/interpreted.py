"""The Triton kernels in Triton's interpreter, on CPU tensors, over a reduced contract; run by the test beside.

A script and not a test: TRITON_INTERPRET has to be set before the kernels are imported. float32 only, as the
interpreter's products of bfloat16 are wrong.
"""

import sys
from dataclasses import replace

import torch

from moetor.kernels.fused_experts import group, table
from moetor.testing import Case, check_backend, contract_cases
from moetor.testing.cases import EVERYTHING


def grid() -> list[Case]:
    """Inference in float32; the largest calls take an interpreter minutes."""
    cases = [replace(case, frozen=EVERYTHING) for case in contract_cases() if case.dtype == torch.float32]
    return [case for case in dict.fromkeys(cases) if case.tokens <= 19 and case.hidden <= 64]


def grouping_of(pairs: int, experts: int, tile_rows: int) -> None:
    """Rows and tiles as a stable sort has them; an id that is an expert's only in its lower 32 bits is none."""
    ids = torch.randint(-1, experts + 1, (pairs,), generator=torch.Generator().manual_seed(pairs))
    ids[::7] += 2**32
    order = [pair for expert in range(experts) for pair in range(pairs) if ids[pair] == expert]
    counts = [int((ids == expert).sum()) for expert in range(experts)]
    ends = [sum(counts[: expert + 1]) for expert in range(experts)]
    wanted = [(e, row, ends[e]) for e in range(experts) for row in range(ends[e] - counts[e], ends[e], tile_rows)]
    plan = group.plan_grouping(pairs, experts, tile_rows, 0)
    _, (got_pairs, tiles) = plan.run(ids)
    most = plan.most_tiles
    assert got_pairs[: ends[-1]].tolist() == order
    assert tiles[3 * most] == len(wanted)
    assert [tuple(tile) for tile in tiles[: 3 * len(wanted)].view(-1, 3).tolist()] == wanted


def main() -> None:
    failed = []

    def check(what: str, cases: list[Case]) -> None:
        try:
            report = check_backend("fused", cases)
        except AssertionError as error:
            failed.append(f"{what}: {error}")
        else:
            print(f"{what}: {report.passed} passed, {report.refused.total()} refused", flush=True)
            assert report.passed

    check("tiles", grid())
    grouping_of(100, 5, 16)
    table.FEW_TOKENS = 4
    few = [replace(case, tokens=3) for case in grid() if case.tokens == 19 and case.hidden == 64]
    check("matrix-vector", few[::2])
    for name in ("_DOWN_VECTOR", "_DOWN_COLUMN_VECTOR"):
        setattr(table, name, tuple(replace(entry, by_pair=not entry.by_pair) for entry in getattr(table, name)))
    check("matrix-vector, the second product the other way", few[1::3])
    group.ONE_LAUNCH, group.CHUNK = 16, 16
    check("grouping in four launches", [replace(grid()[0], tokens=50), replace(grid()[0], tokens=33, top_k=5)])
    grouping_of(100, 5, 16)
    grouping_of(37, 1, 4)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
