//! What one device of a stage holds.

use super::layer_sums::{LayerSums, Totals};
use super::tied_weights;

/// What a device must hold besides activations, and what the search may assume about it.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct MemoryModel {
    /// Bytes of gradients for each byte of weights.
    pub gradients_per_weight: f64,
    /// Bytes of optimizer state for each byte of weights (Adam with two moments: 2).
    pub optimizer_per_weight: f64,
    /// Whether the replicas of a stage share the optimizer state evenly (ZeRO stage 1).
    pub shard_optimizer: bool,
    /// Bytes of each device that nobody may plan with: the framework's own.
    pub reserved_bytes: f64,
}

/// Bytes that one device of a stage holds at its peak.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct Memory {
    /// Weights.
    pub weights_bytes: f64,
    /// Gradients.
    pub gradients_bytes: f64,
    /// Optimizer state.
    pub optimizer_bytes: f64,
    /// What all micro-batches in flight keep for their backward passes.
    pub activations_bytes: f64,
    /// The part of it that one micro-batch keeps from its forward on: of a stage that recomputes, its input.
    pub saved_activation_bytes: f64,
    /// The part that one micro-batch has besides while it runs backward, made again by recomputation.
    pub recomputed_bytes: f64,
    /// Send and receive buffers: an activation and a gradient on each side.
    pub buffers_bytes: f64,
}

impl Memory {
    /// The same with so many bytes of weights more, or fewer.
    #[must_use]
    pub fn with_weights(self, bytes: f64, options: &MemoryModel, replicas: u32) -> Self {
        let optimizer_bytes = bytes * options.optimizer_per_weight;
        Self {
            weights_bytes: self.weights_bytes + bytes,
            gradients_bytes: self.gradients_bytes + bytes * options.gradients_per_weight,
            optimizer_bytes: self.optimizer_bytes
                + if options.shard_optimizer { optimizer_bytes / f64::from(replicas) } else { optimizer_bytes },
            ..self
        }
    }

    /// All of it.
    #[must_use]
    pub fn total_bytes(&self) -> f64 {
        self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes + self.buffers_bytes
    }

    /// Returns the memory with another number of micro-batches in flight.
    #[must_use]
    pub fn with_in_flight(self, max_in_flight: u32) -> Self {
        Self {
            activations_bytes: f64::from(max_in_flight) * self.saved_activation_bytes + self.recomputed_bytes,
            ..self
        }
    }

    /// Returns all bytes with another number of micro-batches in flight.
    #[must_use]
    pub fn bytes_with(&self, max_in_flight: u32) -> f64 {
        self.with_in_flight(max_in_flight).total_bytes()
    }
}

/// What one device of the stage between two cuts holds with `max_in_flight` micro-batches in flight.
#[must_use]
pub fn memory(
    model: &LayerSums,
    totals: &Totals,
    options: &MemoryModel,
    stage: (usize, usize),
    replicas: u32,
    max_in_flight: u32,
    recompute: bool,
) -> Memory {
    let (begin, end) = stage;
    // Sums below two cuts round differently, so next to nothing may come out below zero.
    let between = |below: &[f64]| (below[end] - below[begin]).max(0.0);
    let weights_bytes = between(&model.parameter_bytes) + tied_weights::copied_bytes(model, stage);
    let optimizer_bytes = weights_bytes * options.optimizer_per_weight;
    let saved_bytes = between(&totals.saved_bytes);
    let (input_bytes, output_bytes) = (totals.boundary_bytes[begin], totals.boundary_bytes[end]);
    let max_in_flight = f64::from(max_in_flight);
    // Recomputing keeps each micro-batch's input and, for the one that runs backward, everything.
    let (saved_activation_bytes, recomputed_bytes) =
        if recompute { (input_bytes, saved_bytes) } else { (saved_bytes, 0.0) };
    Memory {
        weights_bytes,
        gradients_bytes: weights_bytes * options.gradients_per_weight,
        optimizer_bytes: if options.shard_optimizer { optimizer_bytes / f64::from(replicas) } else { optimizer_bytes },
        activations_bytes: max_in_flight * saved_activation_bytes + recomputed_bytes,
        saved_activation_bytes,
        recomputed_bytes,
        buffers_bytes: 2.0 * (input_bytes + output_bytes),
    }
}
