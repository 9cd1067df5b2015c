//! What one stage computes: seconds per micro-batch, seconds of gradient synchronisation.
//!
//! A *share* is the number of samples of a micro-batch that one replica handles. Totals over the layers below each cut
//! are kept for every share, so a stage between two cuts costs two subtractions.

use super::network::Rate;
use crate::model::graph::Graph;
use crate::model::states::{self, States};

/// Sums over the layers below each cut, for one share.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    /// Forward seconds.
    pub forward_s: Vec<f64>,
    /// Backward seconds.
    pub backward_s: Vec<f64>,
    /// Bytes kept from forward to backward.
    pub saved_bytes: Vec<f64>,
    /// Bytes that cross the cut (not a sum).
    pub boundary_bytes: Vec<f64>,
    /// Forward seconds of each layer, in topological order (not a sum).
    pub layer_forward_s: Vec<f64>,
    /// Backward seconds of each layer, in topological order (not a sum).
    pub layer_backward_s: Vec<f64>,
}

impl Totals {
    fn blend(&self, other: &Self, weight: f64, other_weight: f64) -> Self {
        let mix = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * weight + b * other_weight).collect();
        Self {
            forward_s: mix(&self.forward_s, &other.forward_s),
            backward_s: mix(&self.backward_s, &other.backward_s),
            saved_bytes: mix(&self.saved_bytes, &other.saved_bytes),
            boundary_bytes: mix(&self.boundary_bytes, &other.boundary_bytes),
            layer_forward_s: mix(&self.layer_forward_s, &other.layer_forward_s),
            layer_backward_s: mix(&self.layer_backward_s, &other.layer_backward_s),
        }
    }
}

/// The model as the search sees it: where it may be cut, and what lies below each cut.
///
/// Cut 0 has no layer below it, the last cut has all of them; a stage lies between two nested cuts.
#[derive(Debug, Clone)]
pub struct Model {
    batch_sizes: Vec<u32>,
    /// Totals at each batch size of the profile.
    measured: Vec<(f64, Totals)>,
    /// Parameter bytes below each cut.
    pub parameter_bytes: Vec<f64>,
    /// For each cut, the cuts strictly inside it, largest first: where a stage that ends there may begin.
    pub begins: Vec<Vec<u32>>,
    /// For each cut, its layers as positions in topological order, ascending.
    below: Vec<Vec<u32>>,
    /// Whether every cut contains the one before it.
    pub is_chain: bool,
    /// Parameter bytes of each layer, in topological order.
    pub layer_parameter_bytes: Vec<f64>,
}

impl Model {
    /// The model with the cuts that `states` lists.
    #[must_use]
    pub fn new(graph: &Graph, states: &States) -> Self {
        let order = states.order();
        let mut position = vec![0_u32; order.len()];
        for (at, &layer) in (0_u32..).zip(order) {
            position[layer] = at;
        }
        let cuts = states.len();
        let below: Vec<Vec<u32>> =
            (0..cuts).map(|cut| states.layers_between(0, cut).iter().map(|&layer| position[layer]).collect()).collect();
        let begins: Vec<Vec<u32>> = (0..cuts)
            .map(|end| (0..end).rev().filter(|&begin| states.is_subset(begin, end)).map(|begin| begin as u32).collect())
            .collect();
        let measured = (graph.batch_sizes.iter().enumerate())
            .map(|(batch, &size)| {
                let each = |value: fn(&states::CutTotals) -> f64| {
                    (0..cuts).map(|cut| value(states.totals(cut, batch))).collect()
                };
                let totals = Totals {
                    forward_s: each(|totals| totals.forward_s),
                    backward_s: each(|totals| totals.backward_s),
                    saved_bytes: each(|totals| totals.saved_bytes),
                    boundary_bytes: each(|totals| totals.boundary_bytes),
                    layer_forward_s: order.iter().map(|&l| graph.layers[l].measured[batch].forward_s).collect(),
                    layer_backward_s: order.iter().map(|&l| graph.layers[l].measured[batch].backward_s).collect(),
                };
                (f64::from(size), totals)
            })
            .collect();
        Self {
            batch_sizes: graph.batch_sizes.clone(),
            measured,
            parameter_bytes: (0..cuts).map(|cut| states.totals(cut, 0).parameter_bytes).collect(),
            is_chain: begins.iter().enumerate().all(|(end, begins)| begins.len() == end),
            begins,
            below,
            layer_parameter_bytes: order.iter().map(|&layer| graph.layers[layer].parameter_bytes).collect(),
        }
    }

    /// How many cuts there are, the empty and the full one included.
    #[must_use]
    pub fn cuts(&self) -> usize {
        self.below.len()
    }

    /// Batch sizes that were measured, ascending.
    #[must_use]
    pub fn batch_sizes(&self) -> &[u32] {
        &self.batch_sizes
    }

    /// Totals for `share` samples: interpolated between measured batch sizes, in proportion beyond them.
    #[must_use]
    pub fn totals(&self, share: u32) -> Totals {
        let share = f64::from(share);
        let after = self.measured.partition_point(|&(batch, _)| batch < share);
        let (low, high) = match after {
            0 => (0, 0),
            after if after == self.measured.len() => (after - 1, after - 1),
            after => (after - 1, after),
        };
        let ((low_batch, low_totals), (high_batch, high_totals)) = (&self.measured[low], &self.measured[high]);
        if low == high {
            return low_totals.blend(low_totals, share / low_batch, 0.0);
        }
        let weight = (share - low_batch) / (high_batch - low_batch);
        low_totals.blend(high_totals, 1.0 - weight, weight)
    }

    /// Layers between two nested cuts as positions in topological order, last first.
    pub fn layers_between(&self, begin: usize, end: usize) -> impl Iterator<Item = u32> {
        let (inner, outer) = (&self.below[begin], &self.below[end]);
        let mut skip = inner.len();
        let is_between = move |layer: &u32| {
            while skip > 0 && inner[skip - 1] > *layer {
                skip -= 1;
            }
            !(skip > 0 && inner[skip - 1] == *layer)
        };
        // Where the cuts are prefixes of one order, these are simply the last layers.
        outer.iter().rev().copied().filter(is_between).take(outer.len() - inner.len())
    }
}

/// Seconds by which gradient synchronisation outlasts the backward pass of a stage, extended by `layers` towards the
/// input; `left_s` is what it was before.
///
/// Each layer's gradients are one message, and messages go out one after another in the order of the backward pass. With
/// overlap, a message may go as soon as its layer's last gradient is ready; else when the whole pass has ended.
#[must_use]
pub fn extend_sync(
    model: &Model,
    totals: &Totals,
    speed: f64,
    layers: impl Iterator<Item = u32>,
    rate: Rate,
    overlap: bool,
    left_s: f64,
) -> f64 {
    if rate == Rate::default() {
        return 0.0;
    }
    layers.fold(left_s, |left_s, layer| {
        let layer = layer as usize;
        let bytes = model.layer_parameter_bytes[layer];
        let message_s = if bytes > 0.0 { bytes * rate.s_per_byte + rate.latency_s } else { 0.0 };
        let left_s = if overlap { (left_s - totals.layer_backward_s[layer] / speed).max(0.0) } else { left_s };
        left_s + message_s
    })
}

/// Gradient synchronisation left after the last backward pass of the stage between two cuts.
#[must_use]
pub fn sync_s(
    model: &Model,
    totals: &Totals,
    speed: f64,
    (begin, end): (usize, usize),
    rate: Rate,
    overlap: bool,
) -> f64 {
    extend_sync(model, totals, speed, model.layers_between(begin, end), rate, overlap, 0.0)
}
