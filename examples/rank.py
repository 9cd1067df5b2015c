"""What one process of a launcher does under a plan: start it once a rank, with RANK and WORLD_SIZE set.

    hpgo plan vgg-19 --cluster dapple-c --global-batch-size 2048 -o plan.json
    torchrun --nproc-per-node 16 examples/rank.py plan.json

It prints the rank's part. A training script builds `mine.layers`, exchanges rows with `mine.receives` and `mine.sends`,
and sums gradients among `mine.peers`. Ranks are the cluster's devices; those that the plan leaves idle have no part.
"""

import os
import sys

import hpgo


def main() -> None:
    """Reads the plan named on the command line and prints this rank's part of it."""
    if len(sys.argv) != 2 or not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        sys.exit("start me as `torchrun … rank.py plan.json`, or with RANK and WORLD_SIZE set")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        plan = hpgo.Plan.read(sys.argv[1])
    except hpgo.HpgoError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
    needed = 1 + max(device for stage in plan.stages for device in stage.devices)
    if world_size < needed:
        sys.exit(f"the plan needs {needed} ranks, not {world_size}")
    if not any(rank in stage.devices for stage in plan.stages):
        print(f"rank {rank}: idle")
        return
    mine = plan.for_rank(rank)
    print(
        f"rank {rank}: stage {mine.stage}, layers {mine.layers[0]} to {mine.layers[-1]},"
        f" samples {mine.rows.start} to {mine.rows.stop - 1} of each of {mine.micro_batches} micro-batches"
    )
    for word, parts in (("receives", mine.receives), ("sends", mine.sends)):
        for other, rows in parts:
            print(f"rank {rank}: {word} samples {rows.start} to {rows.stop - 1}, rank {other}")


if __name__ == "__main__":
    main()
