"""Implementation of `pipeedge-run`: models, weights, data and schedules as in PipeEdge (Hu et al., 2022)."""
