//! The columns of the original's guide: data parallelism without overlap, with P3, and with plain overlap.

use super::{Devices, Model};

/// Memory that the guide gives a device.
const DEVICE_BYTES: f64 = 16e9;

/// Speed-ups of data parallelism on all devices, over one device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Columns {
    /// Gradients are summed when the backward pass has ended.
    pub no_overlap: f64,
    /// Layers sum their gradients during the backward and the next forward pass, as P3 does; None if the weights and
    /// the optimizer leave no memory for a sample.
    pub p3: Option<f64>,
    /// Layers sum their gradients during the backward pass.
    pub overlap: Option<f64>,
}

/// The guide's columns, with its definitions.
#[must_use]
pub fn columns(
    model: &Model,
    devices: &Devices,
    optimizer_memory_scaling: f64,
    peak_activation_bytes_per_sample: f64,
) -> Columns {
    let all: Vec<u32> = (0..devices.count()).collect();
    let whole = &model.states[model.states.len() - 1];
    let speedup = |late_s: f64| whole.compute_s / (whole.compute_s / f64::from(devices.count()) + late_s);
    let samples = accumulation_size(
        model.global_batch_size,
        ((DEVICE_BYTES - whole.parameter_bytes * optimizer_memory_scaling) / peak_activation_bytes_per_sample).floor(),
    );
    let overlapped = |has_forward: bool| {
        let share = f64::from(samples?) / f64::from(model.global_batch_size);
        Some(speedup(late_s(model, devices, &all, share, has_forward)))
    };
    Columns {
        no_overlap: speedup(devices.all_reduce_s(&all, whole.parameter_bytes)),
        p3: overlapped(true),
        overlap: overlapped(false),
    }
}

/// Samples between two gradient accumulations: the whole batch if it fits, else an equal share of it.
fn accumulation_size(global_batch_size: u32, fits: f64) -> Option<u32> {
    if fits >= f64::from(global_batch_size) {
        return Some(global_batch_size);
    }
    if fits.is_nan() || fits < 1.0 {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 1 and the batch size")]
    let least = global_batch_size.div_ceil(fits as u32);
    let most = global_batch_size / 2 + 1;
    let parts = (least..most).find(|&parts| global_batch_size.is_multiple_of(parts)).unwrap_or(least.max(most));
    Some(global_batch_size / parts)
}

/// Seconds of gradient sums that computing does not hide, when `share` of the batch lies between two of them.
fn late_s(model: &Model, devices: &Devices, all: &[u32], share: f64, has_forward: bool) -> f64 {
    // Layers in order; a layer is what a state adds to the one before it.
    let layer = |index: usize| {
        let state = &model.states[index];
        let (compute_s, bytes) = match index.checked_sub(1).map(|before| &model.states[before]) {
            None => (state.compute_s, state.parameter_bytes),
            Some(before) => (state.compute_s - before.compute_s, state.parameter_bytes - before.parameter_bytes),
        };
        (compute_s * share / 2.0, devices.all_reduce_s(all, bytes))
    };
    let layers: Vec<(f64, f64)> = (0..model.states.len()).map(layer).collect();
    let count = layers.len();
    // Gradients come from the last layer to the first, and are looked at from the first to the last.
    let mut late_s = layers[0].1;
    let mut spare_s = 0.0;
    for block in (0..count - 1).rev() {
        let (_, sum_s) = layers[count - 1 - block];
        let (backward_s, _) = layers[count - 2 - block];
        // The original takes the forward time of the layer with the block's number, counted from the other end.
        let forward_s = if has_forward { layers[block + 1].0 } else { 0.0 };
        let room_s = backward_s + forward_s;
        if room_s >= sum_s {
            spare_s += room_s - sum_s;
        } else if sum_s - room_s < spare_s {
            spare_s -= sum_s - room_s;
        } else {
            late_s += sum_s - room_s - spare_s;
            spare_s = 0.0;
        }
    }
    late_s
}
