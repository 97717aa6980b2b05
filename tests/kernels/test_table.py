"""Tiles fit the shared memory that there is, and follow the average rows of an expert alone."""

import pytest

pytest.importorskip("triton", reason="needs the package triton")

import torch

from moetor.kernels.fused_experts import table


@pytest.mark.parametrize("limit_kib", [99, 163, 227])
@pytest.mark.parametrize("rows", [0.5, 4, 16, 40, 200, 4000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tiles_fit(limit_kib: int, rows: float, dtype: torch.dtype) -> None:
    up, down = table.tiles(int(64 * rows), 64, dtype, limit_kib * 1024)
    assert up.shared_bytes(2, dtype.itemsize) <= limit_kib * 1024
    assert down.shared_bytes(1, dtype.itemsize) + down.result_bytes(dtype) <= limit_kib * 1024
    assert min(up.BM >> up.halve, up.BN, up.BK, down.BM, down.BN, down.BK) >= 16  # what tensor cores take


@pytest.mark.parametrize("rows", [4, 16, 40, 200])
def test_full_shared_memory_changes_no_entry(rows: int) -> None:
    up, down = table.tiles(64 * rows, 64, torch.bfloat16, 227 * 1024)
    assert up in table._UP.values()
    assert down in table._DOWN.values()


@pytest.mark.parametrize("rows", [4, 16, 40, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_both_products_cut_the_same_tiles(rows: int, dtype: torch.dtype) -> None:
    up, down = table.tiles(64 * rows, 64, dtype, 99 * 1024)
    assert up.BM == down.BM


@pytest.mark.parametrize("limit_kib", [99, 163, 227])
@pytest.mark.parametrize("rows", [0.5, 4, 16, 40, 200, 4000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tiles_of_gradients_fit_and_their_rows_divide(limit_kib: int, rows: float, dtype: torch.dtype) -> None:
    back, of_x, of_weight = table.backward_tiles(int(64 * rows), 64, dtype, limit_kib * 1024)
    assert back.BM == of_x.BM  # one list of tiles for both
    multiple = table.row_multiple(back)
    assert multiple % of_weight.BK == 0
    heights = (back.BM, back.BM // 2) if back.halve else (back.BM,)
    assert all(height % multiple == 0 for height in heights)  # a tile reaches the next multiple
    for tile in (back, of_x, of_weight):
        assert tile.shared_bytes(1, dtype.itemsize) <= limit_kib * 1024
        assert min(tile.BN // 2, tile.BK) >= 16


def test_taller_tiles_for_more_rows() -> None:
    heights = [table.tiles(64 * rows, 64, torch.bfloat16, 227 * 1024)[0].BM for rows in (1, 16, 40, 200)]
    assert heights == [16, 32, 64, 128]
