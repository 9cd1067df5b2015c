//! The columns of the original's guide: data parallelism without overlap, with P3, and with normal overlap.

use super::{Devices, Model};

/// Memory of a device that the guide assumes, in bytes.
const DEVICE_BYTES: f64 = 16e9;

/// Speed-ups of data parallelism on all devices over one device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Columns {
    /// Speed-up if gradients are reduced after the backward pass.
    pub no_overlap: f64,
    /// Speed-up if layers reduce their gradients during the backward pass and the next forward pass, as P3 does. `None`
    /// if weights and optimizer leave no memory for a sample.
    pub p3: Option<f64>,
    /// Speed-up if layers reduce their gradients during the backward pass. `None` like `p3`.
    pub overlap: Option<f64>,
}

/// Returns the columns of the guide, by its definitions.
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

/// Returns the samples between two gradient accumulations: the whole batch if `fits` samples are enough for it, else an
/// equal part of it. `None` if not even one sample fits.
fn accumulation_size(global_batch_size: u32, fits: f64) -> Option<u32> {
    if fits >= f64::from(global_batch_size) {
        return Some(global_batch_size);
    }
    if fits.is_nan() || fits < 1.0 {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 1 and the batch size")]
    // Parts must be equal, so the smallest divisor of the batch from this number on is taken.
    let min = global_batch_size.div_ceil(fits as u32);
    let max = global_batch_size / 2 + 1;
    let parts = (min..max).find(|&parts| global_batch_size.is_multiple_of(parts)).unwrap_or(min.max(max));
    Some(global_batch_size / parts)
}

/// Returns the seconds of all-reduces that computing does not hide, if `share` of the batch is computed between two of
/// them.
fn late_s(model: &Model, devices: &Devices, all: &[u32], share: f64, has_forward: bool) -> f64 {
    // A layer of the guide is what a state adds to the one before it.
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
    // Gradients are produced from the last layer to the first, but the original visits them in the opposite order.
    let mut late_s = layers[0].1;
    let mut spare_s = 0.0;
    for block in (0..count - 1).rev() {
        let (_, sum_s) = layers[count - 1 - block];
        let (backward_s, _) = layers[count - 2 - block];
        // The original uses the forward time of the layer with the same number counted from the other end, so this
        // does, too.
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
