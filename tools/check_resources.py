"""Reads ptxas's resource report (-v) from a build log. Fails where a kernel spills, where ptxas
serializes a Hopper kernel's products, or where there is no kernel."""

import re
import sys
from pathlib import Path


def main(log: str) -> None:
    text = Path(log).read_text()
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", text)
    registers = [int(r) for r in re.findall(r"Used (\d+) registers", text)]
    if not registers:
        # ccache replays the compiler's report; an empty log means that nothing was compiled.
        raise SystemExit(f"no kernel in {log}")
    bad = [f for f in frames if any(int(v) for v in f)]
    if bad:
        raise SystemExit(
            f"{len(bad)} kernels use a stack frame or spill (frame, stores, loads): {bad}"
        )
    serialized = re.findall(r"wgmma.mma_async instructions are serialized[^\n]*", text)
    if serialized:
        raise SystemExit(f"{len(serialized)} kernels' products are serialized: {serialized[0]}")
    print(f"{len(registers)} kernels, at most {max(registers)} registers, no stack frame, no spill")


if __name__ == "__main__":
    main(sys.argv[1])
