//! The gradient all-reduce of a stage, as far as it outlasts the stage's last backward pass.

use super::device_kinds::{Pace, Passes};
use super::layer_sums::{LayerSums, Totals};
use super::nesting::Nesting;
use super::network::Rate;

/// The all-reduce time that remains after the backward pass of a stage, updated while the stage grows towards the
/// input.
///
/// Each layer with weights is one all-reduce. They run one after another in the order of the backward pass, which is
/// the model's order of layers from the last to the first. With overlap, an all-reduce may start as soon as its layer's
/// last gradient is ready. Without overlap, all of them start when the whole backward pass has ended.
#[derive(Debug)]
pub struct SyncTail<'a> {
    model: &'a LayerSums,
    /// Times on one kind of device.
    passes: Passes<'a>,
    rate: Rate,
    overlap: bool,
    /// Whether layers are added in the order of the backward pass.
    in_order: bool,
    /// Layers in the order of the backward pass, each with the all-reduce seconds that remain when the layer's own
    /// backward pass has ended. Empty if cuts add layers in that order: then `left_s` alone is enough.
    left: Vec<(u32, f64)>,
    /// All-reduce seconds that remain when the backward pass has ended.
    left_s: f64,
}

impl<'a> SyncTail<'a> {
    /// Creates the tail of a stage without layers, on devices whose layers take `passes` and whose all-reduce takes
    /// `rate`.
    #[must_use]
    pub fn new(model: &'a LayerSums, passes: Passes<'a>, rate: Rate, overlap: bool) -> Self {
        let in_order = matches!(model.nesting, Nesting::Row { in_order: true, .. });
        Self { model, passes, rate, overlap, in_order, left: Vec::new(), left_s: 0.0 }
    }

    /// Declares with `true` that layers will be added in the order of the backward pass, last first.
    #[must_use]
    pub fn ordered(self, in_order: bool) -> Self {
        Self { in_order: in_order || self.in_order, ..self }
    }

    /// Adds layers to the stage, last first, and returns the seconds by which its all-reduce outlasts its backward
    /// pass.
    pub fn extend(&mut self, layers: impl Iterator<Item = u32>) -> f64 {
        // The default rate stands for a stage with one replica, which has nothing to reduce.
        if self.rate == Rate::default() {
            return 0.0;
        }
        if self.in_order {
            // Layers that run backward later can't change what remains after earlier ones, so one number is enough.
            self.left_s = layers.fold(self.left_s, |left_s, layer| self.left_after(layer, left_s));
            return self.left_s;
        }
        let mut changed = self.left.len();
        for layer in layers {
            // Cuts of one order may add a layer late that runs backward early.
            let at = self.left.iter().rposition(|&(other, _)| other > layer).map_or(0, |before| before + 1);
            self.left.insert(at, (layer, 0.0));
            changed = changed.min(at);
        }
        // Only the entries behind the first insertion change. The one in front of it has the state to continue from.
        self.left_s = if changed == 0 { 0.0 } else { self.left[changed - 1].1 };
        for at in changed..self.left.len() {
            self.left_s = self.left_after(self.left[at].0, self.left_s);
            self.left[at].1 = self.left_s;
        }
        self.left_s
    }

    /// Returns the seconds by which the all-reduce outlasts the backward pass if `layers`, last first, run backward
    /// behind all other layers, and the all-reduces of these outlast their own backward passes by `left_s`.
    pub fn behind(&self, left_s: f64, layers: impl Iterator<Item = u32>) -> f64 {
        if self.rate == Rate::default() {
            0.0
        } else {
            layers.fold(left_s, |left_s, layer| self.left_after(layer, left_s))
        }
    }

    /// Returns the all-reduce seconds that remain after the backward pass of `layer`, if `left_s` remained before it.
    fn left_after(&self, layer: u32, left_s: f64) -> f64 {
        self.left_after_sending(layer, self.model.layer_parameter_bytes[layer as usize], left_s)
    }

    /// Like `left_after`, but reduces `bytes` of the layer's weights instead of all.
    fn left_after_sending(&self, layer: u32, bytes: f64, left_s: f64) -> f64 {
        // A layer without weights sends no message, so it pays no latency either.
        let message_s = if bytes > 0.0 { bytes * self.rate.s_per_byte + self.rate.latency_s } else { 0.0 };
        let backward_s = self.passes.layer_backward_s[layer as usize] / self.passes.speed;
        (if self.overlap { (left_s - backward_s).max(0.0) } else { left_s }) + message_s
    }
}

/// Returns the seconds by which the all-reduce of the stage between two cuts outlasts its last backward pass.
#[must_use]
pub fn grad_reduce_s(
    model: &LayerSums,
    totals: &Totals,
    pace: Pace,
    stage: (usize, usize),
    rate: Rate,
    overlap: bool,
) -> f64 {
    sync_without_s(model, totals, pace, stage, rate, overlap, &[])
}

/// Returns the result of [`grad_reduce_s`] without some weights: `apart` lists layers and the bytes of their weights
/// that other stages reduce together with this one.
#[must_use]
pub fn sync_without_s(
    model: &LayerSums,
    totals: &Totals,
    pace: Pace,
    (begin, end): (usize, usize),
    rate: Rate,
    overlap: bool,
    apart: &[(u32, f64)],
) -> f64 {
    if rate == Rate::default() {
        return 0.0;
    }
    let sent_bytes = |layer: u32| {
        let own = apart.iter().filter(|&&(other, _)| other == layer);
        own.fold(model.layer_parameter_bytes[layer as usize], |bytes, &(_, apart)| bytes - apart)
    };
    let of_kinds = totals.passes(pace).map(|passes| {
        // The layers come from `layers_between` in the right order, so the tail needs no list of them.
        let tail = SyncTail::new(model, passes, rate, overlap);
        let tail_s = (model.layers_between(begin, end))
            .fold(0.0, |left_s, layer| tail.left_after_sending(layer, sent_bytes(layer), left_s));
        (passes.backward_between_s((begin, end)), tail_s)
    });
    exposed_s(of_kinds, overlap)
}

/// Returns the seconds by which the all-reduce of a stage outlasts its last backward pass, from the backward pass and
/// the remaining all-reduce of a stage on each kind of its devices alone.
///
/// An all-reduce starts when the gradients of all replicas exist, so the last kind decides when each one may start and
/// when the last one ends.
pub fn exposed_s(of_kinds: impl Iterator<Item = (f64, f64)> + Clone, overlap: bool) -> f64 {
    let mut others = of_kinds.clone();
    let only_s = others.next().map_or(0.0, |(_, tail_s)| tail_s);
    // Without overlap, all kinds have the same tail.
    if !overlap || others.next().is_none() {
        return only_s;
    }
    let (backward_s, end_s) = of_kinds.fold((0.0, 0.0), |(longest_s, end_s): (f64, f64), (backward_s, tail_s)| {
        (longest_s.max(backward_s), end_s.max(backward_s + tail_s))
    });
    end_s - backward_s
}
