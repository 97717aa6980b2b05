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
    """Float32, forward and backward; the largest calls take an interpreter minutes."""
    cases = [case for case in contract_cases() if case.dtype == torch.float32 and case.format == "dense"]
    return [smaller(case) for case in dict.fromkeys(cases) if case.tokens <= 19 and case.hidden <= 64]


def smaller(case: Case) -> Case:
    """Two experts and one block of each dimension, where a case is about none of them."""
    usual = Case()
    sizes = ("tokens", "experts", "hidden", "intermediate", "routing")
    if any(getattr(case, name) != getattr(usual, name) for name in sizes) or case == usual:
        return case
    return replace(case, tokens=7, experts=2, hidden=32, intermediate=16)


def inference(cases: list[Case]) -> list[Case]:
    return list(dict.fromkeys(replace(case, frozen=EVERYTHING) for case in cases))


def grouping_of(pairs: int, experts: int, tile_rows: int, pad: int = 1) -> None:
    """Rows and tiles as a stable sort has them; an id that is an expert's only in its lower 32 bits is none."""
    ids = torch.randint(-1, experts + 1, (pairs,), generator=torch.Generator().manual_seed(pairs))
    ids[::7] += 2**32
    plan = group.plan_grouping(pairs, experts, tile_rows, 0, pad)
    _, (got_pairs, tiles, bounds) = plan.run(ids)
    wanted, row = [], 0
    for expert in range(experts):
        own = [pair for pair in range(pairs) if ids[pair] == expert]
        end = row + len(own)
        assert got_pairs[row:end].tolist() == own
        assert bounds[2 * expert : 2 * expert + 2].tolist() == [row, end]
        wanted += [(expert, first, end) for first in range(row, end, tile_rows)]
        row += -(-len(own) // pad) * pad
    assert row <= plan.most_rows
    assert tiles[3 * plan.most_tiles] == len(wanted)
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

    check("several blocks", [Case(), replace(Case(), layout="interleaved", bias=True, gate="gpt_oss")])
    # an interpreter's time goes by operations, whatever their size
    table._FP32 = replace(table._FP32, BN=64, BK=64)
    check("tiles", grid())
    grouping_of(100, 5, 16)
    grouping_of(100, 5, 16, 8)
    table.FEW_TOKENS = 4
    few = inference([replace(case, tokens=3) for case in grid() if case.tokens in (7, 19)])
    check("matrix-vector", few[::2])
    for name in ("_DOWN_VECTOR", "_DOWN_COLUMN_VECTOR"):
        setattr(table, name, tuple(replace(entry, by_pair=not entry.by_pair) for entry in getattr(table, name)))
    check("matrix-vector, the second product the other way", few[1::3])
    group.ONE_LAUNCH, group.CHUNK = 16, 16
    check("grouping in four launches", [replace(grid()[0], tokens=50), replace(grid()[0], tokens=33, top_k=5)])
    grouping_of(100, 5, 16)
    grouping_of(100, 5, 16, 8)
    grouping_of(37, 1, 4)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
