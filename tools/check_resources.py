"""Reads ptxas's resource report (-v) from a build log. Fails where a kernel spills, where ptxas
serializes a Hopper kernel's products, or where there is no kernel."""

import re
import sys
from pathlib import Path


def allowed(kernel: str) -> int:
    """Bytes that a kernel may spill. FP8's float32 results, and its products with rows first, need
    all registers for sums; what they spill they read once a tile, or in the warp that stores,
    outside of the loop that multiplies. Fast ones have one set of sums, and spill none."""
    spills = re.search(r"Fp8StoreSm90If|Fp8RowsFirstSm90", kernel)
    return 100 if spills and "Fp8FastSm90" not in kernel else 0


def main(log: str) -> None:
    text = Path(log).read_text()
    # Each kernel's mangled name, then its frame, spilled stores and loads.
    found = re.findall(
        r"entry function '(\w+)'|(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", text
    )
    frames, spill, kernel = [], 0, ""
    for name, *frame in found:
        kernel = name or kernel
        if name:
            continue
        if max(map(int, frame)) > allowed(kernel):
            frames.append(tuple(frame))
        elif any(map(int, frame)):
            spill += 1
    registers = [int(r) for r in re.findall(r"Used (\d+) registers", text)]
    if not registers:
        # ccache replays the compiler's report; an empty log means that nothing was compiled.
        raise SystemExit(f"no kernel in {log}")
    if frames:
        raise SystemExit(
            f"{len(frames)} kernels use a stack frame or spill (frame, stores, loads): {frames}"
        )
    serialized = re.findall(r"wgmma.mma_async instructions are serialized[^\n]*", text)
    if serialized:
        raise SystemExit(f"{len(serialized)} kernels' products are serialized: {serialized[0]}")
    print(
        f"{len(registers)} kernels, at most {max(registers)} registers; "
        f"{spill} of those that may use a stack frame do, no other"
    )


if __name__ == "__main__":
    main(sys.argv[1])
