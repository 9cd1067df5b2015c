"""What `pipeedge-run` runs: models, weights, data and schedules as PipeEdge (Hu et al., 2022) names and files them."""
