//! What one stage computes: seconds per micro-batch, seconds of gradient synchronisation.
//!
//! A *share* is the number of samples of a micro-batch that one replica handles. Totals over the layers below each cut
//! are kept for every share, so a stage between two cuts costs two subtractions.

use super::network::Rate;
use super::ties::Tie;
use crate::model::graph::{self, Graph, Measurement};
use crate::model::states::{self, Cuts, States};

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
    /// Bytes that each layer keeps from forward to backward, in topological order (not a sum).
    pub layer_saved_bytes: Vec<f64>,
    /// The same of the backward's halves, if any layer has them; of those that don't, they are half of it each.
    pub halves: Option<Halves>,
}

/// Gradients of inputs, and those of weights, each alone: splitting a backward pass has a price.
#[derive(Debug, Clone, Default)]
pub struct Halves {
    /// Seconds of the gradients of inputs, over the layers below each cut.
    pub input_gradient_s: Vec<f64>,
    /// Seconds of the gradients of weights.
    pub weight_gradient_s: Vec<f64>,
    /// Both, of each layer, in topological order (not a sum).
    pub layer_s: Vec<(f64, f64)>,
}

impl Halves {
    /// Of the layers in topological order, of which those below each cut are in `nesting`; `None` if no layer has any.
    fn of(layers: &[Measurement], nesting: &Nesting) -> Option<Self> {
        layers.iter().any(|layer| layer.halves_s.is_some()).then(|| {
            let half = |layer: &Measurement| (layer.backward_s / 2.0, layer.backward_s / 2.0);
            let layer_s: Vec<_> = layers.iter().map(|layer| layer.halves_s.unwrap_or(half(layer))).collect();
            let (inputs, weights): (Vec<_>, Vec<_>) = layer_s.iter().copied().unzip();
            Self {
                input_gradient_s: nesting.sums_below(&inputs),
                weight_gradient_s: nesting.sums_below(&weights),
                layer_s,
            }
        })
    }

    fn blend(&self, other: &Self, weight: f64, other_weight: f64) -> Self {
        let mix = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * weight + b * other_weight).collect();
        let both =
            |(a, b): (&(f64, f64), &(f64, f64))| (a.0 * weight + b.0 * other_weight, a.1 * weight + b.1 * other_weight);
        Self {
            input_gradient_s: mix(&self.input_gradient_s, &other.input_gradient_s),
            weight_gradient_s: mix(&self.weight_gradient_s, &other.weight_gradient_s),
            layer_s: self.layer_s.iter().zip(&other.layer_s).map(both).collect(),
        }
    }
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
            layer_saved_bytes: mix(&self.layer_saved_bytes, &other.layer_saved_bytes),
            halves: (self.halves.as_ref().zip(other.halves.as_ref()))
                .map(|(halves, others)| halves.blend(others, weight, other_weight)),
        }
    }

    /// Seconds of the gradients of a layer's inputs, and of its weights.
    #[must_use]
    pub fn layer_halves_s(&self, layer: usize) -> (f64, f64) {
        let half_s = self.layer_backward_s[layer] / 2.0;
        self.halves.as_ref().map_or((half_s, half_s), |halves| halves.layer_s[layer])
    }
}

/// A batch size between two measured ones: what was measured is `low_weight` times the value at index `low` plus
/// `high_weight` times the value at index `high`.
///
/// Between two measured sizes values are on the line between both. Beyond all of them they are in proportion to the nearest
/// one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interpolation {
    low: usize,
    high: usize,
    low_weight: f64,
    high_weight: f64,
}

impl Interpolation {
    /// Places `batch_size` among `sizes`, which ascend. There is at least one.
    #[must_use]
    pub fn new(sizes: &[f64], batch_size: f64) -> Self {
        let high = sizes.partition_point(|&size| size < batch_size);
        if high == 0 || high == sizes.len() {
            let nearest = high.min(sizes.len() - 1);
            return Self { low: nearest, high: nearest, low_weight: batch_size / sizes[nearest], high_weight: 0.0 };
        }
        let low = high - 1;
        let high_weight = (batch_size - sizes[low]) / (sizes[high] - sizes[low]);
        Self { low, high, low_weight: 1.0 - high_weight, high_weight }
    }

    /// Returns the interpolated value. `values` has one value for each size.
    #[must_use]
    pub fn of(&self, values: &[f64]) -> f64 {
        values[self.low] * self.low_weight + values[self.high] * self.high_weight
    }
}

/// The model as the search sees it: where it may be cut, and what lies below each cut.
///
/// Cut 0 has no layer below it, the last cut has all of them; a stage lies between two nested cuts.
#[derive(Debug, Clone)]
pub struct Model {
    batch_sizes: Vec<u32>,
    /// Totals at each of these batch sizes.
    measured: Vec<Totals>,
    /// Parameter bytes below each cut.
    pub parameter_bytes: Vec<f64>,
    /// Which layers lie below each cut.
    nesting: Nesting,
    /// Whether every cut contains the one before it.
    pub is_chain: bool,
    /// Whether these are all cuts at which a plan may end a stage. Otherwise bounds over them say nothing of other cuts.
    pub has_all_cuts: bool,
    /// Parameter bytes of each layer, in topological order.
    pub layer_parameter_bytes: Vec<f64>,
    /// Weights that layers share.
    pub ties: Vec<Tie>,
}

/// Layers, as positions in topological order.
#[derive(Debug, Clone)]
enum Nesting {
    /// Every cut contains the one before it.
    Row {
        /// Each layer behind those that are below an earlier cut.
        layers: Vec<u32>,
        /// For each cut, how many of them are below it.
        below: Vec<u32>,
        /// Whether that is topological order.
        in_order: bool,
    },
    Listed {
        /// For each cut, the cuts strictly inside it, largest first.
        begins: Vec<Vec<u32>>,
        /// For each cut, its layers, ascending.
        below: Vec<Vec<u32>>,
    },
}

impl Nesting {
    fn of(states: &States) -> Self {
        let order = states.order();
        let cuts = states.len();
        if let Some(enters) = states.enters() {
            let mut layers: Vec<u32> = (0..order.len() as u32).collect();
            layers.sort_by_key(|&layer| enters[layer as usize]);
            let below = |cut: usize| layers.partition_point(|&layer| enters[layer as usize] as usize <= cut) as u32;
            return Self::Row { below: (0..cuts).map(below).collect(), in_order: layers.is_sorted(), layers };
        }
        let mut position = vec![0_u32; order.len()];
        for (at, &layer) in (0_u32..).zip(order) {
            position[layer] = at;
        }
        let below = |cut| states.layers_between(0, cut).iter().map(|&layer| position[layer]).collect();
        let inside = |end: usize| (0..end).rev().filter(move |&begin| states.is_subset(begin, end));
        Self::Listed {
            begins: (0..cuts).map(|end| inside(end).map(|begin| begin as u32).collect()).collect(),
            below: (0..cuts).map(below).collect(),
        }
    }

    /// For each cut, whether a layer is below it.
    fn is_below(&self, layer: u32) -> Vec<bool> {
        match self {
            Self::Row { layers, below, .. } => {
                let place = layers.iter().position(|&other| other == layer);
                below.iter().map(|&below| place.is_some_and(|place| place < below as usize)).collect()
            }
            Self::Listed { below, .. } => below.iter().map(|layers| layers.binary_search(&layer).is_ok()).collect(),
        }
    }

    /// For each cut, the sum over the layers below it of what each layer has, in topological order.
    fn sums_below(&self, each: &[f64]) -> Vec<f64> {
        match self {
            Self::Row { layers, below, .. } => {
                let (mut sum, mut summed) = (0.0, 0);
                (below.iter())
                    .map(|&below| {
                        sum += layers[summed..below as usize].iter().map(|&layer| each[layer as usize]).sum::<f64>();
                        summed = below as usize;
                        sum
                    })
                    .collect()
            }
            Self::Listed { below, .. } => {
                below.iter().map(|layers| layers.iter().map(|&layer| each[layer as usize]).sum()).collect()
            }
        }
    }
}

/// Cuts where a stage may begin, or layers: a range of them, or a list.
#[derive(Debug, Clone)]
pub enum Descending<'a> {
    /// All below a number.
    Range(std::iter::Rev<std::ops::Range<u32>>),
    /// These.
    Some(std::iter::Copied<std::slice::Iter<'a, u32>>),
    /// These, made for the purpose.
    Made(std::vec::IntoIter<u32>),
    /// Those of an ascending list that are not in another one.
    Between {
        /// The list.
        outer: &'a [u32],
        /// The other one, all of whose items are in the first.
        inner: &'a [u32],
    },
}

impl Iterator for Descending<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        match self {
            Self::Range(range) => range.next(),
            Self::Some(items) => items.next(),
            Self::Made(items) => items.next(),
            Self::Between { outer, inner } => {
                while let Some((&last, others)) = outer.split_last() {
                    *outer = others;
                    match inner.split_last() {
                        Some((&other, others)) if other == last => *inner = others,
                        _ => return Some(last),
                    }
                }
                None
            }
        }
    }
}

impl Model {
    /// The model with the cuts that `states` lists.
    #[must_use]
    pub fn new(graph: &Graph, states: &States) -> Self {
        let order = states.order();
        let cuts = states.len();
        let nesting = Nesting::of(states);
        let measured = (0..graph.batch_sizes.len())
            .map(|batch| {
                let each = |value: fn(&states::CutTotals) -> f64| {
                    (0..cuts).map(|cut| value(states.totals(cut, batch))).collect()
                };
                let layers: Vec<Measurement> = order.iter().map(|&layer| graph.layers[layer].measured[batch]).collect();
                Totals {
                    forward_s: each(|totals| totals.forward_s),
                    backward_s: each(|totals| totals.backward_s),
                    saved_bytes: each(|totals| totals.saved_bytes),
                    boundary_bytes: each(|totals| totals.boundary_bytes),
                    layer_forward_s: layers.iter().map(|layer| layer.forward_s).collect(),
                    layer_backward_s: layers.iter().map(|layer| layer.backward_s).collect(),
                    layer_saved_bytes: layers.iter().map(|layer| layer.saved_bytes).collect(),
                    halves: Halves::of(&layers, &nesting),
                }
            })
            .collect();
        let tie = |tie: &graph::Tie| {
            let positions = tie.layers.iter().filter_map(|&layer| order.iter().position(|&other| other == layer));
            let holders = positions.map(|at| (at as u32, nesting.is_below(at as u32))).collect();
            Tie { bytes: tie.bytes, holders }
        };
        Self {
            batch_sizes: graph.batch_sizes.clone(),
            ties: graph.ties.iter().map(tie).collect(),
            measured,
            parameter_bytes: (0..cuts).map(|cut| states.totals(cut, 0).parameter_bytes).collect(),
            is_chain: states.is_linear(),
            has_all_cuts: *states.cuts() == Cuts::Exact,
            nesting,
            layer_parameter_bytes: order.iter().map(|&layer| graph.layers[layer].parameter_bytes).collect(),
        }
    }

    /// How many cuts there are, the empty and the full one included.
    #[must_use]
    pub fn cuts(&self) -> usize {
        self.parameter_bytes.len()
    }

    /// Batch sizes that were measured, ascending.
    #[must_use]
    pub fn batch_sizes(&self) -> &[u32] {
        &self.batch_sizes
    }

    /// Returns the totals for `share` samples, as [`Interpolation`] has them.
    #[must_use]
    pub fn totals(&self, share: u32) -> Totals {
        let sizes: Vec<f64> = self.batch_sizes.iter().map(|&size| f64::from(size)).collect();
        let Interpolation { low, high, low_weight, high_weight } = Interpolation::new(&sizes, f64::from(share));
        self.measured[low].blend(&self.measured[high], low_weight, high_weight)
    }

    /// The cuts strictly inside another, largest first: where a stage that ends there may begin.
    #[must_use]
    pub fn begins(&self, end: usize) -> Descending<'_> {
        match &self.nesting {
            Nesting::Row { .. } => Descending::Range((0..end as u32).rev()),
            Nesting::Listed { begins, .. } => Descending::Some(begins[end].iter().copied()),
        }
    }

    /// The one with this index of [`Model::begins`].
    #[must_use]
    pub fn begin_at(&self, end: usize, index: usize) -> Option<u32> {
        match &self.nesting {
            Nesting::Row { .. } => end.checked_sub(index + 1).map(|begin| begin as u32),
            Nesting::Listed { begins, .. } => begins[end].get(index).copied(),
        }
    }

    /// How many of [`Model::begins`] have larger numbers than a cut.
    #[must_use]
    pub fn begins_behind(&self, end: usize, cut: usize) -> usize {
        match &self.nesting {
            Nesting::Row { .. } => end.saturating_sub(cut + 1),
            Nesting::Listed { begins, .. } => begins[end].partition_point(|&other| other as usize > cut),
        }
    }

    /// Whether one cut lies strictly inside another.
    #[must_use]
    pub fn is_inside(&self, begin: usize, end: usize) -> bool {
        match &self.nesting {
            Nesting::Row { .. } => begin < end,
            Nesting::Listed { begins, .. } => begins[end].binary_search_by(|&other| (begin as u32).cmp(&other)).is_ok(),
        }
    }

    /// How many stages there are to choose from.
    #[must_use]
    pub fn pairs(&self) -> usize {
        match &self.nesting {
            Nesting::Row { below, .. } => below.len() * (below.len() - 1) / 2,
            Nesting::Listed { begins, .. } => begins.iter().map(Vec::len).sum(),
        }
    }

    /// For each cut, the sum over the layers below it of what each layer has, in topological order.
    #[must_use]
    pub fn sums_below(&self, each: &[f64]) -> Vec<f64> {
        self.nesting.sums_below(each)
    }

    /// How many layers are below a cut.
    #[must_use]
    pub fn layers_below(&self, cut: usize) -> usize {
        match &self.nesting {
            Nesting::Row { below, .. } => below[cut] as usize,
            Nesting::Listed { below, .. } => below[cut].len(),
        }
    }

    /// Layers between two nested cuts as positions in topological order, last first.
    #[must_use]
    pub fn layers_between(&self, begin: usize, end: usize) -> Descending<'_> {
        match &self.nesting {
            Nesting::Row { below, in_order: true, .. } => Descending::Range((below[begin]..below[end]).rev()),
            Nesting::Row { layers, below, .. } => {
                let mut between = layers[below[begin] as usize..below[end] as usize].to_vec();
                between.sort_unstable_by(|a, b| b.cmp(a));
                Descending::Made(between.into_iter())
            }
            Nesting::Listed { below, .. } => Descending::Between { outer: &below[end], inner: &below[begin] },
        }
    }
}

/// Gradient synchronisation of a stage that grows towards the input.
///
/// Each layer's gradients are one message, and messages go out one after another in the order of the backward pass, which
/// is the model's order of layers from the last to the first. With overlap, a message may go as soon as its layer's last
/// gradient is ready; else when the whole pass has ended.
#[derive(Debug)]
pub struct SyncTail<'a> {
    model: &'a Model,
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
    pub fn new(model: &'a Model, totals: &'a Totals, speed: f64, rate: Rate, overlap: bool) -> Self {
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
pub fn sync_s(model: &Model, totals: &Totals, speed: f64, stage: (usize, usize), rate: Rate, overlap: bool) -> f64 {
    sync_without_s(model, totals, speed, stage, rate, overlap, &[])
}

/// The same without some bytes of the weights of some layers.
#[must_use]
pub fn sync_without_s(
    model: &Model,
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
