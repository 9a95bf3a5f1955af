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

Lengths are host numbers, or int64 tensors (B,) on the device of the queries: a captured graph reads them where an
update has put them. Then every row has one query, and shapes follow from the table's width alone, so that nothing
has to be known on the host.

Shapes: T query tokens, B rows, M table width, S pool slots, W widest row of this call, H heads, R compressed
width, P rotated width, C = R + P latent width, E = C absorbed query width, N unrotated head width,
Q = N + P plain query width, U value head width, J queries and G cached tokens of one row.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

Lengths: TypeAlias = tuple[int, ...] | torch.Tensor


def attend_absorbed(
    q_THE: torch.Tensor,
    kv_SC: torch.Tensor,
    table_BM: torch.Tensor,
    kv_lens: Lengths,
    q_lens: Lengths,
    *,
    scale: float,
    value_dim: int,
) -> torch.Tensor:
    """Output in the space of latents, (T, H, R) with R = ``value_dim``, in the type of ``q_THE``.

    Raises ValueError when lengths, table and queries do not fit together; of lengths on the device only shapes are
    looked at.
    """
    if isinstance(kv_lens, torch.Tensor) or isinstance(q_lens, torch.Tensor):
        lens_B = _decode_lengths(q_THE, table_BM, kv_lens, q_lens)
        return _decode(q_THE, kv_SC, table_BM, lens_B, scale=scale, value_dim=value_dim, padded=True)
    check_rows(q_THE, table_BM, kv_lens, q_lens)
    if q_lens and len(q_lens) == q_THE.shape[0] and all(n == 1 for n in q_lens):
        longest = max(kv_lens)
        if longest == 0:
            return q_THE.new_zeros((*q_THE.shape[:2], value_dim))
        lens_B, padded = on_device(kv_lens, q_THE.device), min(kv_lens) == 0
        return _decode(
            q_THE, kv_SC, table_BM[:, :longest], lens_B, scale=scale, value_dim=value_dim, padded=padded
        )
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


def _decode_lengths(
    q: torch.Tensor, table_BM: torch.Tensor, kv_lens: Lengths, q_lens: Lengths
) -> torch.Tensor:
    """The key lengths of a decode step whose lengths lie on the device. Raises ValueError."""
    rows = table_BM.shape[0]
    if not (isinstance(kv_lens, torch.Tensor) and isinstance(q_lens, torch.Tensor)):
        raise ValueError("attention lengths: give both as host numbers or both as tensors")
    if not kv_lens.shape == q_lens.shape == (rows,) or q.shape[0] != rows:
        raise ValueError(
            f"attention lengths on the device have shapes {list(kv_lens.shape)} and {list(q_lens.shape)}; each of "
            f"the table's {rows} rows needs one of each and one query token, and {q.shape[0]} were given"
        )
    return kv_lens


def _decode(
    q_BHE: torch.Tensor,
    kv_SC: torch.Tensor,
    table_BW: torch.Tensor,
    lens_B: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
    padded: bool,
) -> torch.Tensor:
    """One query per row, all rows at once, over W positions of each. ``padded``: a length may be 0."""
    rows, width = table_BW.shape
    lens_B1 = lens_B.unsqueeze(1)
    unused_BW = torch.arange(width, device=q_BHE.device) >= lens_B1
    # Unused entries read the row's own first slot: a weight of zero times a stranger's NaN would be NaN.
    slots_BW = torch.where(unused_BW, table_BW[:, :1], table_BW)
    latents_BWC = kv_SC.index_select(0, slots_BW.clamp_min(0).flatten()).view(rows, width, -1)
    scores_BHW = torch.bmm(q_BHE, latents_BWC.transpose(1, 2)).float() * scale
    weights_BHW = scores_BHW.masked_fill_(unused_BW.unsqueeze(1), float("-inf")).softmax(dim=-1)
    out_BHR = torch.bmm(weights_BHW.to(q_BHE.dtype), latents_BWC[..., :value_dim])
    if padded:
        out_BHR = out_BHR.masked_fill_((lens_B1 == 0).unsqueeze(2), 0.0)
    return out_BHR


def on_device(lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The lengths as an int64 tensor, without a copy from host memory on an accelerator.

    Such a copy, from pageable memory, ends on CANN in a synchronisation of the stream: a barrier that the
    engine did not ask for, and the very thing whose absence is under test.
    """
    return torch.tensor(lens, dtype=torch.int64) if device.type == "cpu" else by_value(lens, device)


def by_value(lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """As ``on_device``, one fill a number: those travel with the kernels."""
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
