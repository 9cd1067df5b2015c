//! Memory that one device of a stage needs.

use super::layer_sums::{LayerSums, Totals};
use super::tied_weights;

/// Memory that weights imply on each device, and memory that plans must leave free.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct MemoryModel {
    /// Bytes of gradients for each byte of weights.
    pub gradients_per_weight: f64,
    /// Bytes of optimizer state for each byte of weights (Adam with two moments: 2).
    pub optimizer_per_weight: f64,
    /// What the replicas of a stage share evenly (ZeRO stage): nothing (0), the optimizer state (1), also the gradients
    /// (2), or also the weights (3).
    #[cfg_attr(feature = "python", pyo3(attribute("min_zero_stage")))]
    pub zero_stage: u8,
    /// Highest ZeRO stage that a stage of the pipeline may take. If it is above `zero_stage`, each takes the lowest that
    /// fits with the fewest micro-batches in flight that the schedule allows there.
    pub max_zero_stage: u8,
    /// Bytes of each device that plans must not use, because the framework needs them.
    pub reserved_bytes: f64,
}

impl MemoryModel {
    /// Returns the model with this ZeRO stage everywhere.
    #[must_use]
    pub fn at_zero_stage(self, zero_stage: u8) -> Self {
        Self { zero_stage, max_zero_stage: zero_stage, ..self }
    }

    /// Returns the model with the highest allowed ZeRO stage, which needs the least memory, everywhere.
    #[must_use]
    pub fn least(self) -> Self {
        self.at_zero_stage(self.max_zero_stage)
    }

    /// Returns the number of shards of what replicas share from this ZeRO stage on: 1 if they do not share it.
    fn shards(&self, from_stage: u8, replicas: u32) -> f64 {
        if self.zero_stage >= from_stage { f64::from(replicas) } else { 1.0 }
    }

    /// Returns the bytes that a device holds at least for each byte of trained weights (with gradients and optimizer
    /// state), and for each byte of frozen weights.
    #[must_use]
    pub fn per_weight_byte(&self, replicas: u32) -> (f64, f64) {
        let weights = 1.0 / self.shards(3, replicas);
        let gradients = self.gradients_per_weight / self.shards(2, replicas);
        (weights + gradients + self.optimizer_per_weight / self.shards(1, replicas), weights)
    }
}

/// Bytes that one device of a stage holds at its peak.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct Memory {
    /// Bytes of weights, frozen ones and copies of tied weights included, after sharding.
    pub weights_bytes: f64,
    /// Bytes of weight gradients, after sharding.
    pub gradients_bytes: f64,
    /// Bytes of optimizer state, after sharding.
    pub optimizer_bytes: f64,
    /// Bytes of activations that all micro-batches in flight keep for their backward passes.
    pub activations_bytes: f64,
    /// Bytes that one micro-batch keeps from its forward to its backward pass. With recomputation this is its input.
    pub saved_activation_bytes: f64,
    /// Bytes that recomputation restores for the one micro-batch that runs backward. Zero without recomputation.
    /// Send and receive buffers: an activation and a gradient on each side.
    pub recomputed_bytes: f64,
    /// Bytes of send and receive buffers: an activation and a gradient on each side.
    pub buffers_bytes: f64,
}

impl Memory {
    /// Returns the memory with `bytes` more of trained weights (fewer if negative), with their gradients and optimizer
    /// state.
    #[must_use]
    pub fn with_weights(self, bytes: f64, options: &MemoryModel, replicas: u32) -> Self {
        let shards = |from_stage: u8| options.shards(from_stage, replicas);
        Self {
            weights_bytes: self.weights_bytes + bytes / shards(3),
            gradients_bytes: self.gradients_bytes + bytes * options.gradients_per_weight / shards(2),
            optimizer_bytes: self.optimizer_bytes + bytes * options.optimizer_per_weight / shards(1),
            ..self
        }
    }

    /// Returns the sum of weights, gradients, optimizer state, activations and buffers.
    #[must_use]
    pub fn total_bytes(&self) -> f64 {
        self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes + self.buffers_bytes
    }

    /// Returns the same memory with `max_in_flight` micro-batches in flight.
    #[must_use]
    pub fn with_in_flight(self, max_in_flight: u32) -> Self {
        Self {
            activations_bytes: f64::from(max_in_flight) * self.saved_activation_bytes + self.recomputed_bytes,
            ..self
        }
    }

    /// Returns the memory of a stage that keeps only its inputs, of `input_bytes` for each micro-batch, and recomputes
    /// all other activations of the one that runs backward. This memory must be that of kept activations.
    #[must_use]
    pub fn recomputing(self, input_bytes: f64) -> Self {
        let recomputed_bytes = self.saved_activation_bytes;
        Self { saved_activation_bytes: input_bytes, recomputed_bytes, ..self }
    }

    /// Returns the memory with kept activations of a stage with this memory, which must be that of recomputed ones.
    #[must_use]
    pub fn keeping(self) -> Self {
        Self { saved_activation_bytes: self.recomputed_bytes, recomputed_bytes: 0.0, ..self }
    }

    /// Returns the total bytes with `max_in_flight` micro-batches in flight.
    #[must_use]
    pub fn bytes_with(&self, max_in_flight: u32) -> f64 {
        self.with_in_flight(max_in_flight).total_bytes()
    }
}

/// Returns the memory of one device of the stage between two cuts that keeps its activations, with `max_in_flight`
/// micro-batches in flight.
#[must_use]
pub fn memory(
    model: &LayerSums,
    totals: &Totals,
    options: &MemoryModel,
    stage: (usize, usize),
    replicas: u32,
    max_in_flight: u32,
) -> Memory {
    let (begin, end) = stage;
    // The sums below two cuts round differently, so the difference of two nearly equal sums may be slightly negative.
    let between = |below: &[f64]| (below[end] - below[begin]).max(0.0);
    // Copies of tied weights have gradients and optimizer state of their own, so they count like the stage's weights.
    let trained_bytes = between(&model.parameter_bytes) + tied_weights::copied_bytes(model, stage);
    let weights_bytes = trained_bytes + between(&model.frozen_bytes);
    let (whole_weights_bytes, whole_trained_bytes) = whole_bytes(model, options, stage);
    let held_bytes = |from_stage: u8, bytes: f64, whole_bytes: f64| {
        let whole_bytes = whole_bytes.min(bytes);
        whole_bytes + (bytes - whole_bytes) / options.shards(from_stage, replicas)
    };
    let saved_bytes = between(&totals.saved_bytes);
    let (input_bytes, output_bytes) = (totals.boundary_bytes[begin], totals.boundary_bytes[end]);
    let max_in_flight = f64::from(max_in_flight);
    Memory {
        weights_bytes: held_bytes(3, weights_bytes, whole_weights_bytes),
        gradients_bytes: held_bytes(2, trained_bytes, whole_trained_bytes) * options.gradients_per_weight,
        optimizer_bytes: held_bytes(1, trained_bytes * options.optimizer_per_weight, 0.0),
        activations_bytes: max_in_flight * saved_bytes,
        saved_activation_bytes: saved_bytes,
        recomputed_bytes: 0.0,
        // Each side has a buffer for an activation and one for a gradient of the same size, hence the factor 2.
        buffers_bytes: 2.0 * (input_bytes + output_bytes),
    }
}

/// Returns the bytes of weights, frozen ones included, and the bytes of trained weights whose gradients a device holds
/// whole although replicas share them. Both are 0 where nothing of the kind is shared.
fn whole_bytes(model: &LayerSums, options: &MemoryModel, stage: (usize, usize)) -> (f64, f64) {
    if options.zero_stage < 2 {
        return (0.0, 0.0);
    }
    let (mut weights_bytes, mut trained_bytes) = (0.0_f64, 0.0_f64);
    for layer in model.layers_between(stage.0, stage.1) {
        let of_layer = model.layer_parameter_bytes[layer as usize];
        trained_bytes = trained_bytes.max(of_layer);
        weights_bytes = weights_bytes.max(of_layer + model.layer_frozen_bytes[layer as usize]);
    }
    // A copy counts like a layer. So a stage with more layers never holds less, even if the first holder joins it, and
    // bounds may rely on that.
    let copy_bytes = tied_weights::copies(model, stage).fold(0.0, f64::max);
    // One layer computes while the messages of another one pass, so two layers are whole. The largest counts twice, which
    // needs no order of layers.
    (2.0 * copy_bytes.max(weights_bytes), 2.0 * copy_bytes.max(trained_bytes))
}
