//! Lemma *Any order* (docs/proofs.md#any-order): a lower bound on the step of every plan with one stage per device,
//! regardless of the order in which its stages run their actions.
//!
//! A threshold is a bound if no row of stages from the first cut to the last stays below it. A dynamic program over cuts
//! and numbers of devices decides that: for each prefix, it keeps the shortest way down to the next stage, and the
//! shortest way down and back up. Both are sums over the stages in front, so the minima of all prefixes are enough. The
//! stages of such a row are also a promising plan.

use crate::planner::effort::bounds;
use crate::planner::hybrid::{
    bounds::link_bounds::{Links, min_rate},
    evaluate::stage_cost::StageCost,
    settings::{Recompute, Settings},
    subproblem::Subproblem,
};

use crate::control::Control;
use crate::cost::network::{Cluster, Rate};
use crate::cost::{self, LayerSums, Pace, SyncTail, Totals};

/// Properties of a schedule that its bound uses.
#[derive(Debug, Clone, Copy)]
pub struct AnyOrder {
    /// Whether it may run input gradients and weight gradients apart.
    pub splits_backward: bool,
    /// Whether a micro-batch starts only after the one before it has ended.
    pub is_sequential: bool,
}

impl AnyOrder {
    /// Returns a lower bound on the step of a plan with these stages, in seconds: the lemma for a single plan.
    #[must_use]
    pub fn min_step_s(self, stages: &[StageCost], micro_batches: u32) -> f64 {
        let micro_batches = f64::from(micro_batches);
        let (mut down_s, mut way_s, mut bound_s, mut max_pass_s) = (0.0, 0.0, 0.0_f64, 0.0_f64);
        for (at, stage) in stages.iter().enumerate() {
            let whole_s = stage.backward_s - stage.repeated_s();
            let halves_s =
                (stage.input_gradient_s.zip(stage.weight_gradient_s)).unwrap_or((whole_s / 2.0, whole_s / 2.0));
            let [forward_s, back_s, backward_s] =
                shortest_passes_s((stage.forward_s, whole_s), halves_s, stage.repeated_s(), self.splits_backward);
            let work_s = down_s + micro_batches * (forward_s + backward_s) + stage.exposed_grad_reduce_s;
            let passed_s = if at == 0 { 0.0 } else { way_s + micro_batches * (forward_s + back_s) };
            bound_s = bound_s.max(work_s).max(passed_s);
            down_s += forward_s + stage.transfer_s;
            way_s += forward_s + 2.0 * stage.transfer_s;
            way_s += match (at == 0, self.is_sequential) {
                (false, _) => back_s,
                (true, true) => backward_s,
                (true, false) => backward_s + stage.exposed_grad_reduce_s,
            };
            max_pass_s = max_pass_s.max(forward_s).max(back_s);
        }
        if self.is_sequential {
            return bound_s.max(micro_batches * way_s);
        }
        bound_s.max(way_s + (micro_batches - 1.0) * max_pass_s)
    }
}

/// Stages of a plan in the order of the model: the cuts around each, and its number of replicas.
pub type Row = Vec<(usize, usize, u32)>;

/// The bound over all plans, and promising plans.
#[derive(Debug, Clone)]
pub struct AnyOrderBound {
    /// Lower bound on the step in seconds.
    pub lower_bound_s: f64,
    /// Stages whose bound is lowest, for micro-batch sizes that may have a shorter step than the known one: the size,
    /// whether all stages recompute, and the stages. The most promising one is last.
    pub rows: Vec<(u32, bool, Row)>,
}

/// Bounds the step of every plan that fits memory. `known_s` is the step of one of them. `floors` has a lower bound for
/// each micro-batch size.
///
/// Plans with cuts that `model` does not list are not covered. A search that is stopped, or that has too many stages,
/// returns the smallest of `floors`.
#[must_use]
pub fn min_step_of_any_order_s(
    (model, cluster, settings): (&LayerSums, &Cluster, &Settings),
    order: AnyOrder,
    (floors, known_s): (&[(u32, f64)], f64),
    control: &Control,
) -> AnyOrderBound {
    let mut found = AnyOrderBound { lower_bound_s: known_s, rows: Vec::new() };
    let floor_s = |size: u32| floors.iter().find(|floor| floor.0 == size).map_or(0.0, |floor| floor.1);
    let settings = Settings {
        pipeline_micro_batch_sizes: (settings.pipeline_micro_batch_sizes.iter().copied())
            .filter(|&size| floor_s(size) < known_s)
            .collect(),
        ..settings.clone()
    };
    for task in Subproblem::all(model, cluster, &settings) {
        let (floor_s, known_s) = (floor_s(task.micro_batch), found.lower_bound_s);
        // Another size can only lower the bound below the smallest one so far.
        if floor_s >= known_s {
            continue;
        }
        found.lower_bound_s = floor_s;
        if let Some(stages) = Stages::of(&task, order, known_s).filter(|_| !control.should_stop()) {
            let (bound_s, row) = stages.min_step_s(floor_s, known_s);
            found.lower_bound_s = bound_s;
            found.rows.extend(row.map(|row| (task.micro_batch, task.recompute == Recompute::Always, row)));
        }
    }
    found
}

/// Stages that plans of one micro-batch size may have.
struct Stages {
    /// Stages below the threshold, by the cut at which they end.
    of_end: Vec<Vec<Stage>>,
    /// Number of units of devices of the cluster.
    units: usize,
    micro_batches: f64,
    is_sequential: bool,
    /// Shortest way of one micro-batch through all layers behind each cut and back.
    behind_s: Vec<f64>,
}

/// Shortest times of a stage between two cuts with some number of replicas, in any placement.
struct Stage {
    begin: usize,
    replicas: u32,
    /// Units of devices that the stage takes.
    units: usize,
    forward_s: f64,
    /// Input gradient, or a whole backward if that is shorter.
    back_s: f64,
    /// Backward, whole or as two passes.
    backward_s: f64,
    /// Transfer to the next stage. 0 for the last stage.
    transfer_s: f64,
    exposed_grad_reduce_s: f64,
}

impl Stages {
    /// Returns the stages that stay below `threshold_s` by themselves. `None` if they are too many.
    fn of(task: &Subproblem<'_>, order: AnyOrder, threshold_s: f64) -> Option<Self> {
        let &Subproblem { model, cluster, settings, micro_batches, .. } = task;
        let links = Links::new(task, false);
        let micro_batches = f64::from(micro_batches);
        // Devices are counted in units, rounded down for each stage and up for the cluster, which lowers the bound.
        let unit = cluster.devices().div_ceil(bounds::ANY_ORDER_UNITS);
        let units = cluster.devices().div_ceil(unit) as usize;
        if model.pairs() * links.spans.len() * units > bounds::ANY_ORDER_STEPS {
            return None;
        }
        let highest = |value: fn(&cost::network::Node) -> f64| cluster.nodes.iter().map(value).fold(0.0, f64::max);
        let fastest = highest(|node| node.speed);
        let slowest = cluster.nodes.iter().map(|node| node.speed).fold(f64::INFINITY, f64::min);
        let capacity_bytes = highest(|node| node.memory_bytes) - settings.memory.reserved_bytes;
        let last = model.cuts() - 1;
        let mut of_end: Vec<Vec<Stage>> = Vec::new();
        of_end.resize_with(last + 1, Vec::new);
        for &(min_replicas, max_replicas) in &links.spans {
            let Some(totals) = task.totals_index[min_replicas as usize] else { continue };
            let totals = &task.totals[totals as usize];
            let (transfer, sync) = shortest_rates(&links, (min_replicas, max_replicas));
            for (end, stages) in of_end.iter_mut().enumerate() {
                let mut exposed = Exposed::new(task, totals, (sync, slowest), end);
                for begin in model.begins(end).map(|begin| begin as usize) {
                    let passes = passes_s(totals, (begin, end), task.recompute, order.splits_backward);
                    let [forward_s, back_s, backward_s] = passes.map(|pass_s| pass_s / fastest);
                    if micro_batches * (forward_s + backward_s) >= threshold_s {
                        // In a chain, all other stages that end here have these layers, too.
                        if model.is_chain {
                            break;
                        }
                        continue;
                    }
                    let exposed_grad_reduce_s = exposed.from(begin);
                    let least_bytes = task.memory(totals, (begin, end), max_replicas).least_bytes(1);
                    if least_bytes * (1.0 - ROUNDING) > capacity_bytes {
                        continue;
                    }
                    let transfer_s = task.cut_bytes[end] * transfer.s_per_byte + transfer.latency_s;
                    stages.push(Stage {
                        begin,
                        replicas: min_replicas,
                        units: (min_replicas / unit) as usize,
                        forward_s,
                        back_s,
                        backward_s,
                        transfer_s: if end == last { 0.0 } else { transfer_s },
                        exposed_grad_reduce_s,
                    });
                }
            }
        }
        let behind_s = ways_behind_s(task, order.splits_backward, fastest);
        Some(Self { of_end, units, micro_batches, is_sequential: order.is_sequential, behind_s })
    }

    /// Returns a lower bound on the step of all plans, from `floor_s` to `threshold_s`, by bisection. If it is below
    /// the threshold, the stages are returned that stayed below the lowest one.
    fn min_step_s(&self, floor_s: f64, threshold_s: f64) -> (f64, Option<Row>) {
        let Some(mut row) = self.row_below(threshold_s * (1.0 - ROUNDING)) else { return (threshold_s, None) };
        let (mut low_s, mut high_s) = (floor_s, threshold_s);
        while high_s - low_s > bounds::ANY_ORDER_TOLERANCE * high_s {
            let middle_s = low_s.midpoint(high_s);
            match self.row_below(middle_s) {
                Some(found) => (high_s, row) = (middle_s, found),
                None => low_s = middle_s,
            }
        }
        (low_s * (1.0 - ROUNDING), Some(row))
    }

    /// Returns a row of stages that stays below the threshold, if there is one.
    fn row_below(&self, threshold_s: f64) -> Option<Row> {
        let width = self.units + 1;
        let mut prefixes =
            vec![Prefix { down_s: f64::INFINITY, both_s: f64::INFINITY, last: 0 }; self.of_end.len() * width];
        prefixes[..width].fill(Prefix { down_s: 0.0, both_s: 0.0, last: 0 });
        for (end, stages) in self.of_end.iter().enumerate() {
            for (at, stage) in (0_u32..).zip(stages) {
                let bounds = self.bounds_of(stage, end);
                let (limit_s, both_limit_s) = (threshold_s - bounds.down_s, threshold_s - bounds.both_s);
                for taken in stage.units..width {
                    let from = prefixes[stage.begin * width + taken - stage.units];
                    if from.down_s < limit_s && from.both_s < both_limit_s {
                        let to = &mut prefixes[end * width + taken];
                        to.down_s = to.down_s.min(from.down_s + stage.forward_s + stage.transfer_s);
                        if from.both_s + bounds.way_s < to.both_s {
                            (to.both_s, to.last) = (from.both_s + bounds.way_s, at);
                        }
                    }
                }
            }
        }
        let (mut end, mut taken) = (self.of_end.len() - 1, self.units);
        if prefixes[end * width + taken].both_s.is_infinite() {
            return None;
        }
        // The stages on the shortest way down and back, from the last one to the first.
        let mut row = Row::new();
        while end > 0 {
            let stage = &self.of_end[end][prefixes[end * width + taken].last as usize];
            row.push((stage.begin, end, stage.replicas));
            (end, taken) = (stage.begin, taken - stage.units);
        }
        row.reverse();
        Some(row)
    }

    /// Returns what a stage adds to the way down and to the way down and back, up to the end of the step.
    fn bounds_of(&self, stage: &Stage, end: usize) -> StageBounds {
        let &Stage { begin, forward_s, back_s, backward_s, transfer_s, exposed_grad_reduce_s, .. } = stage;
        // The step ends after a whole backward of the first stage and its reduction, but the others only have to send
        // the gradient of their inputs.
        let own_s = match (begin == 0, self.is_sequential) {
            (false, _) => forward_s + back_s,
            (true, true) => forward_s + backward_s,
            (true, false) => forward_s + backward_s + exposed_grad_reduce_s,
        };
        let way_s = own_s + 2.0 * transfer_s;
        let through_s = way_s + self.behind_s[end];
        let down_s = self.micro_batches * (forward_s + backward_s) + exposed_grad_reduce_s;
        let others = self.micro_batches - 1.0;
        let both_s = if begin == 0 { 0.0 } else { self.micro_batches * (forward_s + back_s) };
        let both_s = both_s.max(through_s + others * forward_s.max(back_s));
        if !self.is_sequential {
            return StageBounds { down_s, both_s, way_s };
        }
        // Each micro-batch takes the whole way, so the ways of all of them are added up.
        let [way_s, through_s] = [way_s, through_s].map(|one_s| self.micro_batches * one_s);
        StageBounds { down_s, both_s: through_s, way_s }
    }
}

/// Shortest exposed gradient reductions of the stages that end at one cut.
struct Exposed<'a> {
    task: &'a Subproblem<'a>,
    totals: &'a Totals,
    rate: Rate,
    /// Speed of the backwards that hide the reduction. The slowest ones hide most of it.
    slowest: f64,
    end: usize,
    /// Reduction of the last stage of a chain that was asked for, and the cut at which that begins.
    tail: (SyncTail<'a>, usize),
}

impl<'a> Exposed<'a> {
    fn new(task: &'a Subproblem<'a>, totals: &'a Totals, (rate, slowest): (Rate, f64), end: usize) -> Self {
        let tail = SyncTail::new(task.model, totals.at_speed(slowest), rate, task.settings.overlap_sync);
        Self { task, totals, rate, slowest, end, tail: (tail, end) }
    }

    /// Returns the reduction of the stage that begins at a cut. Later calls must be for earlier cuts.
    fn from(&mut self, begin: usize) -> f64 {
        let model = self.task.model;
        if model.is_chain {
            let layers = model.layers_between(begin, self.tail.1);
            self.tail.1 = begin;
            return self.tail.0.extend(layers);
        }
        let (overlap, stage) = (self.task.settings.overlap_sync, (begin, self.end));
        if model.pairs() <= bounds::ANY_ORDER_REDUCTIONS {
            return cost::grad_reduce_s(model, self.totals, Pace::at_speed(self.slowest), stage, self.rate, overlap);
        }
        // A backward hides no more than its own time, so the sums give a bound for any order of the layers.
        let between = |below: &[f64]| below[self.end] - below[begin];
        let messages_s = between(&model.parameter_bytes) * self.rate.s_per_byte;
        let hidden_s = if overlap { between(&self.totals.backward_s) / self.slowest } else { 0.0 };
        (messages_s - hidden_s).max(0.0)
    }
}

/// Shortest ways through the stages in front of a cut that take at most some number of units, each by itself.
#[derive(Clone, Copy)]
struct Prefix {
    /// Way down to the cut.
    down_s: f64,
    /// Way down to the cut and back up.
    both_s: f64,
    /// Index of the last stage on the way down and back, among those that end at the cut.
    last: u32,
}

/// Lower bounds on the step, less the way through the stages in front.
struct StageBounds {
    /// Bound without the way down to the stage.
    down_s: f64,
    /// Bound without the way down to the stage and the way back up.
    both_s: f64,
    /// What the stage adds to the way down and back of the stages behind it.
    way_s: f64,
}

/// Relative margin that covers the rounding of sums in different order.
const ROUNDING: f64 = 1e-9;

/// Returns the shortest transfer rate to a next stage, and the shortest all-reduce rate, in any placement.
fn shortest_rates(links: &Links, replicas: (u32, u32)) -> (Rate, Rate) {
    let all = (1, links.spans.last().map_or(1, |span| span.1));
    let mut rates: Vec<(Rate, Rate)> = Vec::new();
    if links.fits_one(replicas) {
        let sync = links.all_reduce_in_one(replicas);
        if links.nodes > 1 {
            rates.push((links.apart(), sync));
            rates.extend(links.one_and_any_spread(replicas).map(|transfer| (transfer, sync)));
        }
        // A next stage on the same node needs a device there. A cluster of one device has no transfers.
        if links.widest > replicas.0 || links.nodes == 1 {
            rates.push((links.beside(replicas, all), sync));
        }
    }
    for spread in links.spreads(replicas) {
        let sync = links.all_reduce_spread(spread);
        rates.push((links.one_and_spread(all, spread), sync));
        rates.extend(links.any_spread(spread).map(|transfer| (transfer, sync)));
    }
    let shorter = |a: (Rate, Rate), b: (Rate, Rate)| (min_rate(a.0, b.0), min_rate(a.1, b.1));
    rates.into_iter().reduce(shorter).unwrap_or_default()
}

/// Returns the forward, the input gradient and the backward of the layers between two cuts, at speed 1. The last two
/// include a repeated forward, and are never longer than a whole backward.
fn passes_s(totals: &Totals, (begin, end): (usize, usize), recompute: Recompute, splits_backward: bool) -> [f64; 3] {
    let between = |below: &[f64]| (below[end] - below[begin]).max(0.0);
    let (forward_s, whole_s) = (between(&totals.forward_s), between(&totals.backward_s));
    let halves_s = totals.halves.as_ref().map_or((whole_s / 2.0, whole_s / 2.0), |halves| {
        (between(&halves.input_gradient_s), between(&halves.weight_gradient_s))
    });
    let repeated_s = (recompute.min_forwards() - 1.0) * forward_s;
    shortest_passes_s((forward_s, whole_s), halves_s, repeated_s, splits_backward)
}

/// Returns the forward, the input gradient and the backward of layers with these times, with repeated forwards.
fn shortest_passes_s(
    (forward_s, whole_s): (f64, f64),
    (input_s, weight_s): (f64, f64),
    repeated_s: f64,
    splits_backward: bool,
) -> [f64; 3] {
    // A schedule that splits backwards may still run some of them whole.
    let (back_s, backward_s) =
        if splits_backward { (whole_s.min(input_s), whole_s.min(input_s + weight_s)) } else { (whole_s, whole_s) };
    [forward_s, repeated_s + back_s, repeated_s + backward_s]
}

/// Returns the shortest way of one micro-batch through the layers behind each cut and back, in seconds.
fn ways_behind_s(task: &Subproblem<'_>, splits_backward: bool, fastest: f64) -> Vec<f64> {
    let shares = || task.totals_index.iter().flatten().map(|&index| &task.totals[index as usize]);
    let layer_s: Vec<f64> = (0..task.model.layer_parameter_bytes.len())
        .map(|layer| {
            let ways_s = shares().map(|totals| {
                let whole_s = (totals.layer_forward_s[layer], totals.layer_backward_s[layer]);
                let repeated_s = (task.recompute.min_forwards() - 1.0) * whole_s.0;
                let [forward_s, back_s, _] =
                    shortest_passes_s(whole_s, totals.layer_halves_s(layer), repeated_s, splits_backward);
                (forward_s + back_s) / fastest
            });
            ways_s.fold(f64::INFINITY, f64::min)
        })
        .collect();
    let below_s = task.model.sums_below(&layer_s);
    let all_s = below_s[below_s.len() - 1];
    below_s.into_iter().map(|below_s| (all_s - below_s).max(0.0)).collect()
}
