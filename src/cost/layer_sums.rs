//! Seconds and bytes of the layers of a stage.
//!
//! For every number of samples that a replica may get of a micro-batch, the sums over the layers below each cut are
//! stored (prefix sums), so the cost of a stage between two cuts is the difference of two sums.

use super::device_kinds::{Pace, PassTimes, Passes};
use super::nesting::{Descending, Nesting};
use super::tied_weights::TiedWeight;
use crate::model::graph::{self, Graph, Measurement};
use crate::model::states::{self, CutPoints, Cuts};

/// Sums over the layers below each cut, for one number of samples.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    /// Seconds of forward passes.
    pub forward_s: Vec<f64>,
    /// Seconds of backward passes.
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
    /// Input-gradient and weight-gradient seconds, if any layer has measurements of them. Layers without measurements
    /// count half of their backward pass as each.
    pub halves: Option<Halves>,
    /// Times on each kind of device. If empty, all devices have the times above, divided by their speed.
    /// Otherwise the times above are bounding times (see [`super::device_kinds`]).
    pub kinds: Vec<PassTimes>,
}

/// Seconds of the two halves of a backward pass, run separately. Together they may take longer than the whole pass.
#[derive(Debug, Clone, Default)]
pub struct Halves {
    /// Seconds of input gradients, summed over the layers below each cut.
    pub input_gradient_s: Vec<f64>,
    /// Seconds of weight gradients, summed over the layers below each cut.
    pub weight_gradient_s: Vec<f64>,
    /// Seconds of input gradients and of weight gradients of each layer, in topological order (not a sum).
    pub layer_s: Vec<(f64, f64)>,
}

impl Halves {
    /// Sums the halves of `layers`, listed in topological order, below each cut of `nesting`. `None` if no layer has
    /// measurements of them.
    fn of(layers: &[Measurement], nesting: &Nesting) -> Option<Self> {
        // One measured layer is enough to tell the halves apart. All others are split evenly.
        layers.iter().any(|layer| layer.halves_s.is_some()).then(|| Self::split(layers, nesting))
    }

    /// Sums the halves of `layers`, each of which is half of its backward pass if it has no measurement of them.
    fn split(layers: &[Measurement], nesting: &Nesting) -> Self {
        let half = |layer: &Measurement| (layer.backward_s / 2.0, layer.backward_s / 2.0);
        let layer_s: Vec<_> = layers.iter().map(|layer| layer.halves_s.unwrap_or(half(layer))).collect();
        // Prefix sums as for whole passes, so a stage's halves also cost two subtractions.
        let (inputs, weights): (Vec<_>, Vec<_>) = layer_s.iter().copied().unzip();
        Self { input_gradient_s: nesting.sums_below(&inputs), weight_gradient_s: nesting.sums_below(&weights), layer_s }
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

impl PassTimes {
    fn blend(&self, other: &Self, weight: f64, other_weight: f64) -> Self {
        let mix = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * weight + b * other_weight).collect();
        Self {
            forward_s: mix(&self.forward_s, &other.forward_s),
            backward_s: mix(&self.backward_s, &other.backward_s),
            layer_backward_s: mix(&self.layer_backward_s, &other.layer_backward_s),
            halves: (self.halves.as_ref().zip(other.halves.as_ref()))
                .map(|(halves, others)| halves.blend(others, weight, other_weight)),
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
            kinds: (self.kinds.iter().zip(&other.kinds))
                .map(|(kind, others)| kind.blend(others, weight, other_weight))
                .collect(),
        }
    }

    /// Returns the times of the layers on devices of unknown kind, the slowest of which has this speed.
    #[must_use]
    pub fn at_speed(&self, speed: f64) -> Passes<'_> {
        Passes {
            forward_s: &self.forward_s,
            backward_s: &self.backward_s,
            layer_backward_s: &self.layer_backward_s,
            halves: self.halves.as_ref(),
            speed,
        }
    }

    /// Returns the times of the layers on each kind among the devices of a stage. The longest of each pass counts.
    pub fn passes(&self, pace: Pace) -> impl Iterator<Item = Passes<'_>> + Clone {
        let listed = if self.kinds.is_empty() { 0 } else { pace.kinds };
        let unlisted = (listed == 0).then(|| self.at_speed(pace.speed));
        let of_kinds = self.kinds.iter().enumerate().filter(move |&(kind, _)| listed >> kind & 1 == 1);
        unlisted.into_iter().chain(of_kinds.map(|(_, times)| Passes {
            forward_s: &times.forward_s,
            backward_s: &times.backward_s,
            layer_backward_s: &times.layer_backward_s,
            halves: times.halves.as_ref(),
            speed: 1.0,
        }))
    }

    /// Returns the forward and the backward seconds of the layers between two cuts on the slowest kind of each.
    #[must_use]
    pub fn longest_s(&self, pace: Pace, cuts: (usize, usize)) -> (f64, f64) {
        // Searches ask for the stages of one kind millions of times.
        if self.kinds.is_empty() {
            let passes = self.at_speed(pace.speed);
            return (passes.forward_between_s(cuts), passes.backward_between_s(cuts));
        }
        self.passes(pace).fold((0.0, 0.0), |(forward_s, backward_s): (f64, f64), passes| {
            (forward_s.max(passes.forward_between_s(cuts)), backward_s.max(passes.backward_between_s(cuts)))
        })
    }

    /// Returns the seconds of the gradients of a layer's inputs and of its weights.
    #[must_use]
    pub fn layer_halves_s(&self, layer: usize) -> (f64, f64) {
        let half_s = self.layer_backward_s[layer] / 2.0;
        self.halves.as_ref().map_or((half_s, half_s), |halves| halves.layer_s[layer])
    }
}

/// The position of a batch size among the measured ones, as two indices and two weights.
///
/// The interpolated value is `low_weight` times the value at index `low` plus `high_weight` times the value at index
/// `high`. Between two measured sizes it is on the straight line between them. Outside the measured range it is in
/// proportion to the value at the nearest size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interpolation {
    low: usize,
    high: usize,
    low_weight: f64,
    high_weight: f64,
}

impl Interpolation {
    /// Locates `batch_size` among `sizes`, which must ascend and have at least one element.
    #[must_use]
    pub fn new(sizes: &[f64], batch_size: f64) -> Self {
        let high = sizes.partition_point(|&size| size < batch_size);
        // Proportion instead of a continued line: a line through two sizes can fall below zero for small shares.
        if high == 0 || high == sizes.len() {
            let nearest = high.min(sizes.len() - 1);
            return Self { low: nearest, high: nearest, low_weight: batch_size / sizes[nearest], high_weight: 0.0 };
        }
        let low = high - 1;
        let high_weight = (batch_size - sizes[low]) / (sizes[high] - sizes[low]);
        Self { low, high, low_weight: 1.0 - high_weight, high_weight }
    }

    /// Returns the interpolated value. `values` must have one value for each size.
    #[must_use]
    pub fn of(&self, values: &[f64]) -> f64 {
        values[self.low] * self.low_weight + values[self.high] * self.high_weight
    }
}

/// The model as the search sees it: its cuts, and the sums over the layers below each of them.
///
/// Cut 0 has no layer below it and the last cut has all of them. A stage is the set of layers between two nested cuts.
#[derive(Debug, Clone)]
pub struct LayerSums {
    batch_sizes: Vec<u32>,
    /// Sums at each of `batch_sizes`, in the same order.
    measured: Vec<Totals>,
    /// Bytes of the trained weights of the layers below each cut.
    pub parameter_bytes: Vec<f64>,
    /// Bytes of the frozen weights of the layers below each cut. They only take memory.
    pub frozen_bytes: Vec<f64>,
    /// The layers below each cut, and which cuts contain which.
    pub(super) nesting: Nesting,
    /// Whether every cut contains the one before it.
    pub is_chain: bool,
    /// Whether these are all cuts at which a plan may end a stage. Otherwise a bound over these cuts does not hold for
    /// plans with other cuts.
    pub has_all_cuts: bool,
    /// Bytes of each layer's trained weights, in topological order.
    pub layer_parameter_bytes: Vec<f64>,
    /// Bytes of each layer's frozen weights, in topological order.
    pub layer_frozen_bytes: Vec<f64>,
    /// Weights that layers share.
    pub tied_weights: Vec<TiedWeight>,
}

impl LayerSums {
    /// Computes the sums of `graph` for the cuts that `states` lists.
    #[must_use]
    pub fn new(graph: &Graph, states: &CutPoints) -> Self {
        let order = states.order();
        let cuts = states.len();
        let nesting = Nesting::of(states);
        // Sums are stored for measured batch sizes only. Interpolation is linear, so sums interpolate like single
        // layers.
        let measured = (0..graph.batch_sizes.len())
            .map(|batch| {
                let each = |value: fn(&states::CutSums) -> f64| {
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
                    kinds: Vec::new(),
                }
            })
            .collect();
        // Whether a holder is below a cut is asked for every stage that the search tries, so it is tabulated here.
        let tie = |tie: &graph::TiedWeight| {
            let positions = tie.layers.iter().filter_map(|&layer| order.iter().position(|&other| other == layer));
            let holders = positions.map(|at| (at as u32, nesting.is_below(at as u32))).collect();
            TiedWeight { bytes: tie.bytes, holders }
        };
        let layer_frozen_bytes: Vec<f64> = order.iter().map(|&layer| graph.layers[layer].frozen_bytes).collect();
        let frozen_bytes = nesting.sums_below(&layer_frozen_bytes);
        Self {
            batch_sizes: graph.batch_sizes.clone(),
            tied_weights: graph.tied_weights.iter().map(tie).collect(),
            measured,
            // Weights do not depend on the batch size, so the sums at the first one serve for all.
            parameter_bytes: (0..cuts).map(|cut| states.totals(cut, 0).parameter_bytes - frozen_bytes[cut]).collect(),
            frozen_bytes,
            is_chain: states.is_linear(),
            has_all_cuts: *states.cuts() == Cuts::Exact,
            nesting,
            layer_parameter_bytes: order.iter().map(|&layer| graph.layers[layer].trained_bytes()).collect(),
            layer_frozen_bytes,
        }
    }

    /// Replaces the times at one measured batch size by bounding times and the times of each kind of device. All lists
    /// are in topological order.
    pub(super) fn set_times(
        &mut self,
        batch: usize,
        bounding: &[Measurement],
        kinds: impl Iterator<Item = Vec<Measurement>>,
    ) {
        let nesting = &self.nesting;
        let has_halves = bounding.iter().any(|layer| layer.halves_s.is_some());
        let passes = |layers: &[Measurement]| {
            let forward_s: Vec<f64> = layers.iter().map(|layer| layer.forward_s).collect();
            let layer_backward_s: Vec<f64> = layers.iter().map(|layer| layer.backward_s).collect();
            let times = PassTimes {
                forward_s: nesting.sums_below(&forward_s),
                backward_s: nesting.sums_below(&layer_backward_s),
                layer_backward_s,
                halves: has_halves.then(|| Halves::split(layers, nesting)),
            };
            (forward_s, times)
        };
        let (layer_forward_s, PassTimes { forward_s, backward_s, layer_backward_s, halves }) = passes(bounding);
        let kinds = kinds.map(|layers| passes(&layers).1).collect();
        let totals = &mut self.measured[batch];
        (totals.layer_forward_s, totals.layer_backward_s) = (layer_forward_s, layer_backward_s);
        (totals.forward_s, totals.backward_s, totals.halves, totals.kinds) = (forward_s, backward_s, halves, kinds);
    }

    /// Returns the number of cuts, the empty and the full one included.
    #[must_use]
    pub fn cuts(&self) -> usize {
        self.parameter_bytes.len()
    }

    /// Returns the batch sizes that were measured, in ascending order.
    #[must_use]
    pub fn batch_sizes(&self) -> &[u32] {
        &self.batch_sizes
    }

    /// Returns the sums for `samples_per_replica` samples, interpolated between measured batch sizes as
    /// [`Interpolation`] describes.
    #[must_use]
    pub fn totals(&self, samples_per_replica: u32) -> Totals {
        let sizes: Vec<f64> = self.batch_sizes.iter().map(|&size| f64::from(size)).collect();
        let Interpolation { low, high, low_weight, high_weight } =
            Interpolation::new(&sizes, f64::from(samples_per_replica));
        self.measured[low].blend(&self.measured[high], low_weight, high_weight)
    }

    /// Returns whether no pass of a layer and no bytes fall as samples are added.
    #[must_use]
    pub fn grows_with_samples(&self) -> bool {
        let grows = |value: fn(&Totals) -> &[f64]| {
            self.measured
                .windows(2)
                .all(|pair| value(&pair[0]).iter().zip(value(&pair[1])).all(|(few, many)| few <= many))
        };
        grows(|totals| &totals.layer_forward_s)
            && grows(|totals| &totals.layer_backward_s)
            && grows(|totals| &totals.layer_saved_bytes)
            && grows(|totals| &totals.boundary_bytes)
    }

    /// Returns sums that no number of at least `samples_per_replica` samples goes below: each pass and the bytes of each
    /// layer are the least over all of these numbers.
    ///
    /// They have no times of single kinds of devices, and no halves of backward passes.
    #[must_use]
    pub fn least_totals(&self, samples_per_replica: u32) -> Totals {
        let Totals { mut layer_forward_s, mut layer_backward_s, mut layer_saved_bytes, mut boundary_bytes, .. } =
            self.totals(samples_per_replica);
        // Between measured sizes all values are on lines, and beyond the largest they rise, so the least is at one of
        // these sizes or at the number itself.
        for (&size, measured) in self.batch_sizes.iter().zip(&self.measured) {
            if size > samples_per_replica {
                let lower = |least: &mut [f64], values: &[f64]| {
                    least.iter_mut().zip(values).for_each(|(least, &value)| *least = least.min(value));
                };
                lower(&mut layer_forward_s, &measured.layer_forward_s);
                lower(&mut layer_backward_s, &measured.layer_backward_s);
                lower(&mut layer_saved_bytes, &measured.layer_saved_bytes);
                lower(&mut boundary_bytes, &measured.boundary_bytes);
            }
        }
        Totals {
            forward_s: self.nesting.sums_below(&layer_forward_s),
            backward_s: self.nesting.sums_below(&layer_backward_s),
            saved_bytes: self.nesting.sums_below(&layer_saved_bytes),
            boundary_bytes,
            layer_forward_s,
            layer_backward_s,
            layer_saved_bytes,
            halves: None,
            kinds: Vec::new(),
        }
    }

    /// Returns the forward and backward seconds together of the layers between two cuts, at each measured batch size.
    #[must_use]
    pub fn measured_s(&self, pace: Pace, cuts: (usize, usize)) -> Vec<f64> {
        let both_s = |(forward_s, backward_s): (f64, f64)| forward_s + backward_s;
        self.measured.iter().map(|totals| both_s(totals.longest_s(pace, cuts))).collect()
    }

    /// Returns the cuts strictly inside `end`, largest number first: a stage that ends at `end` may begin at any of
    /// them.
    #[must_use]
    pub fn begins(&self, end: usize) -> Descending<'_> {
        match &self.nesting {
            // All cuts are nested, so no list is stored: it would have a number of entries quadratic in the cuts.
            Nesting::Row { .. } => Descending::Range((0..end as u32).rev()),
            Nesting::Listed { begins, .. } => Descending::Some(begins[end].iter().copied()),
        }
    }

    /// Returns the cut at position `index` of [`LayerSums::begins`], or `None` behind its end.
    #[must_use]
    pub fn begin_at(&self, end: usize, index: usize) -> Option<u32> {
        match &self.nesting {
            Nesting::Row { .. } => end.checked_sub(index + 1).map(|begin| begin as u32),
            Nesting::Listed { begins, .. } => begins[end].get(index).copied(),
        }
    }

    /// Returns the number of cuts in [`LayerSums::begins`] that are larger than `cut`.
    #[must_use]
    pub fn begins_behind(&self, end: usize, cut: usize) -> usize {
        match &self.nesting {
            Nesting::Row { .. } => end.saturating_sub(cut + 1),
            // The list descends, so the larger cuts form its beginning.
            Nesting::Listed { begins, .. } => begins[end].partition_point(|&other| other as usize > cut),
        }
    }

    /// Returns whether cut `begin` is strictly inside cut `end`.
    #[must_use]
    pub fn is_inside(&self, begin: usize, end: usize) -> bool {
        match &self.nesting {
            Nesting::Row { .. } => begin < end,
            Nesting::Listed { begins, .. } => begins[end].binary_search_by(|&other| (begin as u32).cmp(&other)).is_ok(),
        }
    }

    /// Returns the number of possible stages: pairs of cuts of which one is strictly inside the other.
    #[must_use]
    pub fn pairs(&self) -> usize {
        match &self.nesting {
            // Any two cuts of a row bound a stage.
            Nesting::Row { below, .. } => below.len() * (below.len() - 1) / 2,
            Nesting::Listed { begins, .. } => begins.iter().map(Vec::len).sum(),
        }
    }

    /// Sums `each`, one value per layer in topological order, over the layers below each cut.
    #[must_use]
    pub fn sums_below(&self, each: &[f64]) -> Vec<f64> {
        self.nesting.sums_below(each)
    }

    /// Returns the number of layers below `cut`.
    #[must_use]
    pub fn layers_below(&self, cut: usize) -> usize {
        match &self.nesting {
            Nesting::Row { below, .. } => below[cut] as usize,
            Nesting::Listed { below, .. } => below[cut].len(),
        }
    }

    /// Returns the layers between two nested cuts as positions in topological order, last first.
    #[must_use]
    pub fn layers_between(&self, begin: usize, end: usize) -> Descending<'_> {
        match &self.nesting {
            Nesting::Row { below, in_order: true, .. } => Descending::Range((below[begin]..below[end]).rev()),
            Nesting::Row { layers, below, .. } => {
                // The row adds layers by cut, not in topological order, but the backward pass needs the latter.
                let mut between = layers[below[begin] as usize..below[end] as usize].to_vec();
                between.sort_unstable_by(|a, b| b.cmp(a));
                Descending::Made(between.into_iter())
            }
            Nesting::Listed { below, .. } => Descending::Between { outer: &below[end], inner: &below[begin] },
        }
    }
}
