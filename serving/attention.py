"""Latent attention over a paged pool: the absorbed form that is served, and the plain form, its oracle.

Here: attention of given queries over cached latents. Not here: projections and rotation (``deepseek_v2.py``),
who owns which slot (``kv_cache.py``).

Each cached token is one latent vector: R compressed numbers that keys and values are made from, then P of
the rotated key that all heads share. *Absorbed*: queries come already multiplied into the space of latents,
so that latents serve as keys and, their first R numbers, as values; nothing is expanded. *Plain*: keys and
values of every head are expanded from the latents first.

Rows: row b of a batch owns the next ``q_lens[b]`` query tokens, which are the last ones of its ``kv_lens[b]``
cached tokens; position p of it lies in pool slot ``table_BM[b, p]``. Entries of the table at and past
``kv_lens[b]`` are never used, whatever they hold. A row with ``kv_lens[b] == 0`` is padding: its output is
zero. Query tokens that no row owns get zero too. No output depends on slots that its row does not own, not
even when those hold NaN.

Shapes: T query tokens, B rows, M table width, S pool slots, W widest row of this call, H heads, R compressed
width, P rotated width, C = R + P latent width, E = C absorbed query width, N unrotated head width,
Q = N + P plain query width, U value head width, J queries and G cached tokens of one row.
"""

from __future__ import annotations

import torch


def attend_absorbed(
    q_THE: torch.Tensor,
    kv_SC: torch.Tensor,
    table_BM: torch.Tensor,
    kv_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
    *,
    scale: float,
    value_dim: int,
) -> torch.Tensor:
    """Output in the space of latents, (T, H, R) with R = ``value_dim``, in the type of ``q_THE``.

    Raises ValueError when lengths, table and queries do not fit together.
    """
    check_rows(q_THE, table_BM, kv_lens, q_lens)
    if q_lens and len(q_lens) == q_THE.shape[0] and all(n == 1 for n in q_lens):
        return _decode(q_THE, kv_SC, table_BM, kv_lens, scale=scale, value_dim=value_dim)
    out_THR = q_THE.new_zeros((*q_THE.shape[:2], value_dim))
    for tokens, latents_GC in _rows(kv_SC, table_BM, kv_lens, q_lens):
        weights_HJG = _causal_softmax(q_THE[tokens].transpose(0, 1) @ latents_GC.T * scale)
        out_THR[tokens] = (weights_HJG @ latents_GC[:, :value_dim]).transpose(0, 1)
    return out_THR


def attend_plain(
    q_THQ: torch.Tensor,
    kv_SC: torch.Tensor,
    table_BM: torch.Tensor,
    kv_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
    *,
    key_up_HNR: torch.Tensor,
    value_up_HRU: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Output per head, (T, H, U): the oracle of ``attend_absorbed``, slow and direct.

    Raises ValueError as ``attend_absorbed`` does.
    """
    check_rows(q_THQ, table_BM, kv_lens, q_lens)
    rank, heads = key_up_HNR.shape[-1], key_up_HNR.shape[0]
    out_THU = q_THQ.new_zeros((*q_THQ.shape[:2], value_up_HRU.shape[-1]))
    for tokens, latents_GC in _rows(kv_SC, table_BM, kv_lens, q_lens):
        compressed_GR, rotated_GP = latents_GC[:, :rank], latents_GC[:, rank:]
        keys_HGN = compressed_GR @ key_up_HNR.transpose(1, 2)
        keys_HGQ = torch.cat((keys_HGN, rotated_GP.expand(heads, -1, -1)), dim=-1)
        values_HGU = compressed_GR @ value_up_HRU
        scores_HJG = q_THQ[tokens].transpose(0, 1) @ keys_HGQ.transpose(1, 2) * scale
        out_THU[tokens] = (_causal_softmax(scores_HJG) @ values_HGU).transpose(0, 1)
    return out_THU


def check_rows(
    q: torch.Tensor, table_BM: torch.Tensor, kv_lens: tuple[int, ...], q_lens: tuple[int, ...]
) -> None:
    """Raises ValueError when rows do not fit queries or table. Looks at shapes and host numbers only."""
    if not len(kv_lens) == len(q_lens) == table_BM.shape[0]:
        raise ValueError(
            f"attention rows: {len(kv_lens)} kv_lens, {len(q_lens)} q_lens and {table_BM.shape[0]} rows of "
            "the table; each row needs one of each"
        )
    if sum(q_lens) > q.shape[0]:
        raise ValueError(f"attention rows own {sum(q_lens)} query tokens, but {q.shape[0]} were given")
    for row, (kv_len, q_len) in enumerate(zip(kv_lens, q_lens, strict=True)):
        if kv_len < 0 or q_len < 0 or kv_len > table_BM.shape[1] or (kv_len and q_len > kv_len):
            raise ValueError(
                f"attention row {row} has {q_len} query tokens and {kv_len} cached ones; the table has "
                f"{table_BM.shape[1]} positions, and queries are among the cached tokens"
            )


def _decode(
    q_BHE: torch.Tensor,
    kv_SC: torch.Tensor,
    table_BM: torch.Tensor,
    kv_lens: tuple[int, ...],
    *,
    scale: float,
    value_dim: int,
) -> torch.Tensor:
    """One query per row: all rows at once, padded to the longest."""
    rows, width = len(kv_lens), max(kv_lens)
    if width == 0:
        return q_BHE.new_zeros((*q_BHE.shape[:2], value_dim))
    lens_B1 = _on_device(kv_lens, q_BHE.device).unsqueeze(1)
    unused_BW = torch.arange(width, device=q_BHE.device) >= lens_B1
    # Unused entries read the row's own first slot: a weight of zero times a stranger's NaN would be NaN.
    slots_BW = torch.where(unused_BW, table_BM[:, :1], table_BM[:, :width])
    latents_BWC = kv_SC.index_select(0, slots_BW.clamp_min(0).flatten()).view(rows, width, -1)
    scores_BHW = torch.bmm(q_BHE, latents_BWC.transpose(1, 2)).float() * scale
    weights_BHW = scores_BHW.masked_fill_(unused_BW.unsqueeze(1), float("-inf")).softmax(dim=-1)
    out_BHR = torch.bmm(weights_BHW.to(q_BHE.dtype), latents_BWC[..., :value_dim])
    if min(kv_lens) == 0:
        out_BHR = out_BHR.masked_fill_((lens_B1 == 0).unsqueeze(2), 0.0)
    return out_BHR


def _on_device(lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The lengths as an int64 tensor, without a copy from host memory on an accelerator.

    Such a copy, from pageable memory, ends on CANN in a synchronisation of the stream: a barrier that the
    engine did not ask for, and the very thing whose absence is under test. Filling passes numbers by value.
    """
    if device.type == "cpu":
        return torch.tensor(lens, dtype=torch.int64)
    lens_B = torch.empty(len(lens), dtype=torch.int64, device=device)
    for row, length in enumerate(lens):
        lens_B[row].fill_(length)
    return lens_B


def _rows(
    kv_SC: torch.Tensor, table_BM: torch.Tensor, kv_lens: tuple[int, ...], q_lens: tuple[int, ...]
) -> list[tuple[slice, torch.Tensor]]:
    """For every row that has something to compute: its query tokens and its cached latents in order."""
    found, start = [], 0
    for row, (kv_len, q_len) in enumerate(zip(kv_lens, q_lens, strict=True)):
        if kv_len and q_len:
            found.append((slice(start, start + q_len), kv_SC.index_select(0, table_BM[row, :kv_len])))
        start += q_len
    return found


def _causal_softmax(scores_HJG: torch.Tensor) -> torch.Tensor:
    """Weights in the type of the scores; query i of J sees the first G - J + i + 1 cached tokens."""
    queries, cached = scores_HJG.shape[-2:]
    visible_JG = torch.ones(queries, cached, dtype=torch.bool, device=scores_HJG.device).tril(
        cached - queries
    )
    masked_HJG = scores_HJG.float().masked_fill(~visible_JG, float("-inf"))
    return masked_HJG.softmax(dim=-1).to(scores_HJG.dtype)
