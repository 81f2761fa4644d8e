"""One process that compares the logits of exported weights with those of transformers, in float32."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.base.files import write_object
from megalite.base.late_import import import_for_good
from megalite.checkpoint.weights.sources import open_weights
from megalite.config.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.start.start import start_alone
from megalite_tools.checkpoint.compare_weights import logits


def main(arguments: Sequence[str]) -> int:
    """Compare the weights of a checkpoint with those of a Hugging Face folder that was exported from it.

    arguments: checkpoint, folder, JSON file to write. Returns the exit code.
    """
    checkpoint, folder, out = arguments
    torch.set_num_threads(1)
    write_object(Path(out), compare(checkpoint, folder))
    return 0


def compare(checkpoint: str, folder: str) -> dict[str, Any]:
    """Compare the logits of all positions of one random sequence.

    Returns the class of transformers, and the largest difference of a logit, relative to the largest logit.
    """
    transformers = import_for_good("transformers")
    found = open_weights(checkpoint)
    length = found.model.sequence_length
    tokens = torch.randint(found.model.vocab_size, (length, 1), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    ).eval()
    with torch.inference_mode():
        expected = theirs(input_ids=tokens.T).logits.transpose(0, 1)
    start_alone()
    try:
        mesh = Mesh.build(Layout(), torch.device("cpu"))
        assert mesh is not None
        ours = logits(found, mesh, tokens)
    finally:
        dist.destroy_process_group()
    return {
        "model": type(theirs).__name__,
        "tokens": length,
        "difference": float((ours - expected).abs().max() / expected.abs().max()),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
