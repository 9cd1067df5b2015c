"""Train with a program on torch.distributed: any numbers of replicas, also uneven ones, and any schedule of one chain.

    torchrun --nproc-per-node 4 examples/engine.py program.json

`program.json` comes from `Plan.program().save(...)`. A process needs only its `RankProgram`. It runs the actions in
order, receives the inputs of each action before it and sends the outputs after it. At the end it sums gradients over
replicas. The model here is a chain of small layers and the data is random. Replace both by yours. hpgo needs no torch.
"""

import os
import sys

import torch
import torch.distributed as dist

import hpgo

WIDTH = 6


class Engine:
    """The layers of one rank, `{layer id: module}`, and the code that runs its actions."""

    def __init__(self, mine, layers):
        self.mine, self.layers = mine, torch.nn.ModuleDict(layers)
        self.stages = {stage.stage: stage for stage in mine.stages}
        self.parameters = {
            stage.stage: [p for layer in stage.layers for p in self.layers[layer].parameters()] for stage in mine.stages
        }
        # `new_group` is collective: every rank must create every group, in the same order, also groups without it.
        self.groups = {ranks: dist.new_group(ranks) for ranks in mine.groups}

    def step(self, inputs, targets):
        """Run one step over the global batch. Leaves summed gradients and returns this rank's part of the mean loss."""
        self.layers.zero_grad()
        self.forwards, self.backwards, self.here, self.sent = {}, {}, {}, []
        loss = torch.zeros(())
        for action in self.mine.actions:
            stage, key = self.stages[action.stage], (action.stage, action.micro_batch)
            received = self._receive(action)
            if action.kind == "F":
                begin = action.micro_batch * self.mine.pipeline_micro_batch_size
                rows = slice(begin + stage.rows.start, begin + stage.rows.stop)
                given = inputs[rows] if stage.is_first else received.requires_grad_()
                value = given
                for layer in stage.layers:
                    value = self.layers[layer](value)
                if stage.is_last:
                    value = ((value - targets[rows]) ** 2).mean(1).sum() * self.mine.loss_weight
                    loss += value.detach()
                self.forwards[key] = given, value
                self._send(action, stage, value)
                continue
            # Split backward passes: `I` computes the gradient of the input, which the stage before waits for.
            # `W` computes the gradients of the weights later, from the same graph, so `I` retains it.
            if action.kind == "W":
                given, value, gradient = self.backwards.pop(key)
            else:
                (given, value), gradient = self.forwards.pop(key), received
            if action.kind == "I":
                self.backwards[key] = given, value, gradient
            wanted = self.parameters[action.stage] if action.kind in "BW" else []
            back = [given] if action.kind in "BI" and not stage.is_first else []
            if not wanted and not back:
                continue
            found = torch.autograd.grad(value, [*back, *wanted], gradient, retain_graph=action.kind == "I")
            for parameter, part in zip(wanted, found[len(back) :], strict=True):
                parameter.grad = part if parameter.grad is None else parameter.grad + part
            self._send(action, stage, found[0])
        for one in self.sent:
            one.wait()
        for one in self.mine.sums:
            if len(one.ranks) > 1:
                for parameter in (p for layer in one.layers for p in self.layers[layer].parameters()):
                    dist.all_reduce(parameter.grad, group=self.groups[one.ranks])
        return loss

    def _tag(self, action, message):
        # Two ranks may exchange several tensors at once, so a tag names the micro-batch and both stages.
        stages = self.mine.total_stages
        return (action.micro_batch * stages + message.from_stage) * stages + message.to_stage

    def _receive(self, action):
        """Receive the rows of all senders and return them as one tensor, or None if the action receives nothing."""
        parts = []
        for message in action.receives:
            if message.peer == self.mine.rank:
                parts.append(self.here.pop(self._tag(action, message)))
            else:
                parts.append(torch.empty(len(message.rows), WIDTH))
                dist.recv(parts[-1], message.peer, tag=self._tag(action, message))
        return torch.cat(parts) if parts else None

    def _send(self, action, stage, value):
        """Send each receiver its rows without waiting, so that no two ranks can wait for each other."""
        for message in action.sends:
            first = message.rows.start - stage.rows.start
            part = value.detach()[first : first + len(message.rows)].clone()
            if message.peer == self.mine.rank:
                self.here[self._tag(action, message)] = part
            else:
                self.sent.append(dist.isend(part, message.peer, tag=self._tag(action, message)))


def make_layer(name):
    """Return a layer whose weights depend only on its name, so that all replicas start with equal weights."""
    torch.manual_seed(sum(name.encode()))
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    program = hpgo.Program.read(sys.argv[1])
    mine = program.for_rank(int(os.environ["RANK"]))
    engine = Engine(mine, {layer: make_layer(layer) for stage in mine.stages for layer in stage.layers})
    loss = engine.step(*torch.randn(2, program.global_batch_size, WIDTH, generator=torch.Generator().manual_seed(0)))
    dist.all_reduce(loss)
    print(f"rank {mine.rank}: loss {loss.item():.6f}")
    dist.destroy_process_group()
