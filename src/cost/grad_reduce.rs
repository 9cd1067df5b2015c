//! Gradient all-reduce of a stage that outlasts its last backward pass.

use super::layer_sums::{LayerSums, Totals};
use super::nesting::Nesting;
use super::network::Rate;

/// Gradient synchronisation of a stage that grows towards the input.
///
/// Each layer's gradients are one message, and messages go out one after another in the order of the backward pass, which
/// is the model's order of layers from the last to the first. With overlap, a message may go as soon as its layer's last
/// gradient is ready; else when the whole pass has ended.
#[derive(Debug)]
pub struct SyncTail<'a> {
    model: &'a LayerSums,
    totals: &'a Totals,
    speed: f64,
    rate: Rate,
    overlap: bool,
    /// Whether layers come in the order of the backward pass.
    in_order: bool,
    /// Layers in the order of the backward pass, each with what is left to send when its own backward has ended; nothing
    /// where cuts take layers in in that order.
    left: Vec<(u32, f64)>,
    /// What is left to send when the backward pass has ended.
    left_s: f64,
}

impl<'a> SyncTail<'a> {
    /// Of a stage without layers, on devices of this speed that sum gradients at this rate.
    #[must_use]
    pub fn new(model: &'a LayerSums, totals: &'a Totals, speed: f64, rate: Rate, overlap: bool) -> Self {
        let in_order = matches!(model.nesting, Nesting::Row { in_order: true, .. });
        Self { model, totals, speed, rate, overlap, in_order, left: Vec::new(), left_s: 0.0 }
    }

    /// The same for layers that are known to come in the order of the backward pass, last first, if they do.
    #[must_use]
    pub fn ordered(self, in_order: bool) -> Self {
        Self { in_order: in_order || self.in_order, ..self }
    }

    /// Seconds by which synchronisation outlasts the backward pass with these layers, too; last first.
    pub fn extend(&mut self, layers: impl Iterator<Item = u32>) -> f64 {
        if self.rate == Rate::default() {
            return 0.0;
        }
        if self.in_order {
            self.left_s = layers.fold(self.left_s, |left_s, layer| self.left_after(layer, left_s));
            return self.left_s;
        }
        let mut changed = self.left.len();
        for layer in layers {
            // Cuts of one order may take in a layer late that runs backward early.
            let at = self.left.iter().rposition(|&(other, _)| other > layer).map_or(0, |before| before + 1);
            self.left.insert(at, (layer, 0.0));
            changed = changed.min(at);
        }
        self.left_s = if changed == 0 { 0.0 } else { self.left[changed - 1].1 };
        for at in changed..self.left.len() {
            self.left_s = self.left_after(self.left[at].0, self.left_s);
            self.left[at].1 = self.left_s;
        }
        self.left_s
    }

    /// Seconds by which synchronisation outlasts the backward pass, if it outlasts that of all other layers by `left_s` and
    /// these come behind them; last first.
    pub fn behind(&self, left_s: f64, layers: impl Iterator<Item = u32>) -> f64 {
        if self.rate == Rate::default() {
            0.0
        } else {
            layers.fold(left_s, |left_s, layer| self.left_after(layer, left_s))
        }
    }

    /// What is left to send when the backward of `layer` has ended, if it was `left_s` before that.
    fn left_after(&self, layer: u32, left_s: f64) -> f64 {
        self.left_after_sending(layer, self.model.layer_parameter_bytes[layer as usize], left_s)
    }

    /// The same if so many bytes of the layer's weights are sent.
    fn left_after_sending(&self, layer: u32, bytes: f64, left_s: f64) -> f64 {
        let message_s = if bytes > 0.0 { bytes * self.rate.s_per_byte + self.rate.latency_s } else { 0.0 };
        let backward_s = self.totals.layer_backward_s[layer as usize] / self.speed;
        (if self.overlap { (left_s - backward_s).max(0.0) } else { left_s }) + message_s
    }
}

/// Gradient synchronisation left after the last backward pass of the stage between two cuts.
#[must_use]
pub fn grad_reduce_s(
    model: &LayerSums,
    totals: &Totals,
    speed: f64,
    stage: (usize, usize),
    rate: Rate,
    overlap: bool,
) -> f64 {
    sync_without_s(model, totals, speed, stage, rate, overlap, &[])
}

/// The same without some bytes of the weights of some layers.
#[must_use]
pub fn sync_without_s(
    model: &LayerSums,
    totals: &Totals,
    speed: f64,
    (begin, end): (usize, usize),
    rate: Rate,
    overlap: bool,
    apart: &[(u32, f64)],
) -> f64 {
    if rate == Rate::default() {
        return 0.0;
    }
    let tail = SyncTail::new(model, totals, speed, rate, overlap);
    let sent_bytes = |layer: u32| {
        let own = apart.iter().filter(|&&(other, _)| other == layer);
        own.fold(model.layer_parameter_bytes[layer as usize], |bytes, &(_, apart)| bytes - apart)
    };
    (model.layers_between(begin, end))
        .fold(0.0, |left_s, layer| tail.left_after_sending(layer, sent_bytes(layer), left_s))
}
