"""What XLA says that it will run on a GPU."""

from pathlib import Path


def custom_calls(folder: Path, name: str) -> tuple[list[str], list[str]]:
    """Those of the computation ``name`` inside command buffers and outside, of a folder that XLA
    has dumped into."""
    inside, outside, captured = [], [], False
    for file in folder.glob(f"*{name}*.thunk_sequence_after_thunk_passes.txt"):
        for line in file.read_text().splitlines():
            if line[:1].strip():
                captured = "kCommandBuffer" in line
            if "kCustomCall" in line:
                (inside if captured else outside).append(line)
    return inside, outside
