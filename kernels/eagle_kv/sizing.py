"""How wide a row of draft `kv_indices` must be, how much of it a batch uses, and the guards on both.

One place for every backend, as SGLang #27475 made it. Plain integers only: nothing here touches a device.
"""

INT32_LIMIT = 2**31


def check_int32_width(width: int, *, num_seqs: int, topk: int, max_context_len: int) -> None:
    """Refuse a row whose last element an int32 offset cannot reach (SGLang #27486).

    Raises AssertionError when `width` (elements) is 2**31 or more. It raises rather than asserts, so that
    `python -O` keeps it.
    """
    if width >= INT32_LIMIT:
        raise AssertionError(
            f"kv_indices row of {width} elements reaches the int32 limit {INT32_LIMIT} "
            f"(num_seqs={num_seqs}, topk={topk}, max_context_len={max_context_len})"
        )


def draft_kv_indices_buffer_width(num_seqs: int, topk: int, max_context_len: int) -> int:
    """Elements in one step's row: each of `num_seqs * topk` branches may list `max_context_len` slots.

    `num_seqs` is the live batch in eager mode and `max_bs` for CUDA graphs. Raises AssertionError as
    `check_int32_width` does. Source: SGLang #27338, #27460 (the topk factor), #27486 (the limit).
    """
    width = num_seqs * topk * max_context_len
    check_int32_width(width, num_seqs=num_seqs, topk=topk, max_context_len=max_context_len)
    return width


def draft_kv_indices_used_len(seq_lens_sum: int, topk: int, bs: int, num_steps: int) -> int:
    """Elements that a row holds through `num_steps` draft steps, for `bs = num_seqs * topk` branches.

    Every branch lists its request's prefix, and one more slot a step: `seq_lens_sum * topk + bs * num_steps`.
    """
    return seq_lens_sum * topk + bs * num_steps


def check_row_fits(
    used_len: int, row_width: int, *, topk: int, num_seqs: int, seq_lens_sum: int, num_steps: int
) -> None:
    """Refuse a batch that would write past its row, before the kernel does (SGLang #27338, #27460).

    `used_len` and `row_width` are in elements. Raises AssertionError when the row is too small. A correct width
    can be too small as well: it has no room for draft tokens when every request is near `max_context_len`.
    """
    if used_len > row_width:
        raise AssertionError(
            f"EAGLE draft kv_indices row too small: need {used_len}, row has {row_width} "
            f"(topk={topk}, num_seqs={num_seqs}, seq_lens_sum={seq_lens_sum}, num_steps={num_steps})"
        )
