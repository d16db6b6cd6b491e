"""What PEFT makes of a model and its adapters: ``python peft_logits.py FOLDER``.

The folder has ``model``, ``adapters`` and ``tokens.npy``. ``theirs.npz`` gets the logits with the
adapters and without, and the names of the adapters' tensors.
"""

import sys
from pathlib import Path

import numpy as np
import peft
import torch
import transformers


def main(folder: Path) -> None:
    of = transformers.AutoModelForCausalLM
    model = of.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    tokens = torch.tensor(np.load(folder / "tokens.npy")[None].astype(np.int64))
    with torch.no_grad():
        plain = model(tokens).logits[0].numpy()
        model = peft.PeftModel.from_pretrained(model, folder / "adapters")
        adapted = model(tokens).logits[0].numpy()
    names = [key.replace(".default.", ".") for key in model.state_dict() if ".lora_" in key]
    np.savez(folder / "theirs.npz", plain=plain, adapted=adapted, names=sorted(names))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
