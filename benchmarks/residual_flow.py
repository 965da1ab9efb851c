"""What do the paper's image-size residual flows cost: forward with log-determinant, inverse with its error, training step, memory?

The 16-16-16 model on 3x32x32 and the CelebA-64 table's 4 x 16 blocks with four fully connected ones on 3x64x64, width 512, c = 0.98, at
initialisation (ActNorm started from the batch), random inputs. Needs a GPU.

    PYTHONPATH=src python benchmarks/residual_flow.py --out results/residual_flow/h200.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bilip import models

MODELS = {
    "cifar10, 16-16-16": ((3, 32, 32), {"blocks": (16, 16, 16)}),
    "celeba64, 4 x 16 and 4 dense": (
        (3, 64, 64),
        {"blocks": (16, 16, 16, 16), "squeeze_first": True, "dense_blocks": 4, "dense_hidden": 128},
    ),
}


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure(shape: tuple[int, ...], options: dict, batch: int, seed: int) -> dict:
    torch.manual_seed(seed)
    model = models.residual_flow(shape, hidden=512, coefficient=0.98, logit=0.05, **options).cuda()
    x = torch.rand(batch, *shape, device="cuda")
    with torch.no_grad():
        model.train()(x)  # starts ActNorm
        model.eval()
        z = model(x)
        back = model.inverse(z)
        row = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "largest_error": float((back.double() - x.double()).flatten(1).norm(dim=1).max()),
            "forward_and_log_det_s": seconds(lambda: model.forward_and_log_det(x)),
            "inverse_s": seconds(lambda: model.inverse(z)),
        }
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        z, log_det = model.forward_and_log_det(x)
        (0.5 * z.flatten(1).square().sum(1) - log_det).mean().backward()
        optimizer.step()

    torch.cuda.reset_peak_memory_stats()
    row["training_step_s"] = seconds(step)
    row["training_peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/residual_flow/gpu.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    document = {
        "command": f"python benchmarks/residual_flow.py --batch {args.batch} --seed {args.seed}",
        "environment": {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "precision": "float32, TF32 off",
        },
        "models": {},
    }
    for name, (shape, options) in MODELS.items():
        document["models"][name] = row = measure(shape, options, args.batch, args.seed)
        print(name, row)
        torch.cuda.empty_cache()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
