//! What a plan takes and holds whose devices run several stages each.

use crate::planner::effort::orders as effort;
use crate::planner::hybrid::{CandidatePlan, PlanEvaluator, Settings, StageCandidate, StageCost};
use rustc_hash::FxHashMap;

use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::{Error, Result};
use crate::schedule::{Durations, Kind, Schedule};
use crate::simulate::{Costs, Links, StageTimes, Sweep, Transfer};

/// A plan that was simulated.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// The simulated step.
    pub step_s: f64,
    /// For each stage what it costs. Its activations are those that it holds when its group holds most.
    pub stages: Vec<StageCost>,
    /// For each stage, the most micro-batches that it holds activations of.
    pub in_flight: Vec<u32>,
    /// Memory that a device lacks; 0 if the plan fits.
    pub shortfall_bytes: f64,
    /// The same as a part of what the device has.
    missing_part: f64,
}

/// Sums in another order round differently: a device is full so far below its memory.
const ROUNDING: f64 = 1e-12;

impl Run {
    /// Whether every device holds what it must.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.shortfall_bytes == 0.0
    }

    /// What the search makes small: the step, longer where memory is missing.
    #[must_use]
    pub fn score(&self) -> f64 {
        self.step_s * (1.0 + effort::SHORTFALL_PENALTY * self.missing_part)
    }

    /// Whether it is the better answer: the one that fits, the shorter step, or what lacks less memory.
    #[must_use]
    pub fn is_better_than(&self, other: &Self) -> bool {
        (self.shortfall_bytes, self.step_s) < (other.shortfall_bytes, other.step_s)
    }
}

/// What the groups of a schedule hold at once: counts of micro-batches that no other moment exceeds.
///
/// A rank works on one action at a time, so its order alone decides that.
#[derive(Debug)]
pub(super) struct Peaks {
    /// For each rank its stages, ...
    stages: Vec<Vec<usize>>,
    /// ... and for moments at which it may hold most, how many micro-batches each of them keeps, and how many it has
    /// made again by recomputation.
    moments: Vec<Vec<Vec<(u32, u32)>>>,
    /// Whether some backward is split.
    splits_backward: bool,
}

impl Peaks {
    pub(super) fn of(orders: &Schedule) -> Self {
        let stages: Vec<Vec<usize>> = (0..orders.ranks())
            .map(|rank| (0..orders.rank_of_stage.len()).filter(|&s| orders.rank_of_stage[s] == rank).collect())
            .collect();
        let moments = orders.orders.iter().zip(&stages).map(|(order, stages)| moments(order, stages)).collect();
        let splits_backward = orders.orders.iter().flatten().any(|action| action.kind == Kind::WeightGradient);
        Self { stages, moments, splits_backward }
    }

    /// For each stage, the most micro-batches that it keeps.
    fn in_flight(&self) -> Vec<u32> {
        let mut most = vec![0; self.stages.iter().map(Vec::len).sum()];
        for (stages, moments) in self.stages.iter().zip(&self.moments) {
            for (place, &stage) in stages.iter().enumerate() {
                most[stage] = moments.iter().map(|moment| moment[place].0).max().unwrap_or(0);
            }
        }
        most
    }
}

/// Counts of kept and of recomputed micro-batches of each of `stages` at moments that no other one exceeds in all.
fn moments(order: &[crate::schedule::Action], stages: &[usize]) -> Vec<Vec<(u32, u32)>> {
    let place = |stage: u32| stages.iter().position(|&own| own == stage as usize);
    let mut now = vec![(0_u32, 0_u32); stages.len()];
    let mut most: Vec<Vec<(u32, u32)>> = Vec::new();
    for action in order {
        for half in action.halves() {
            let Some(place) = place(half.stage) else { continue };
            match half.kind {
                Kind::Forward => now[place].0 += 1,
                Kind::Backward | Kind::InputGradient => now[place].1 += 1,
                Kind::WeightGradient | Kind::Overlapped => {}
            }
        }
        let below = |a: &[(u32, u32)], b: &[(u32, u32)]| a.iter().zip(b).all(|(a, b)| a.0 <= b.0 && a.1 <= b.1);
        if !most.iter().any(|moment| below(&now, moment)) {
            most.retain(|moment| !below(moment, &now));
            most.push(now.clone());
        }
        for half in action.halves() {
            let Some(place) = place(half.stage) else { continue };
            if matches!(half.kind, Kind::Backward | Kind::WeightGradient) {
                now[place] = (now[place].0.saturating_sub(1), now[place].1.saturating_sub(1));
            }
        }
    }
    most
}

/// Seconds of I and W, each half of the backward where the profile doesn't say; the forward that recomputation repeats
/// is part of I.
fn halves_s(stage: &StageCost, recompute: bool) -> (f64, f64) {
    let repeated_s = if recompute { stage.forward_s } else { 0.0 };
    let half_s = (stage.backward_s - repeated_s) / 2.0;
    (repeated_s + stage.input_gradient_s.unwrap_or(half_s), stage.weight_gradient_s.unwrap_or(half_s))
}

/// What a whole backward hides of the sums of gradients, and W alone can't.
fn unhidden_s(stage: &StageCost, recompute: bool, weight_gradient_s: f64) -> f64 {
    let repeated_s = if recompute { stage.forward_s } else { 0.0 };
    (stage.backward_s - repeated_s - weight_gradient_s).max(0.0)
}

/// Runs priced stages in these orders.
///
/// `stages` come priced as if each had devices of its own; what stages of one group have from each other is not sent,
/// gradients have the last W alone to hide behind where backwards are split, those of a group are summed one stage after
/// the other, and memory is that of the fullest moment.
pub(super) fn run(
    orders: &Schedule,
    peaks: &Peaks,
    mut stages: Vec<StageCost>,
    recompute: bool,
    sweep: &mut Sweep,
) -> Result<Run> {
    for at in 1..stages.len() {
        if orders.rank_of_stage[at - 1] == orders.rank_of_stage[at] {
            stages[at - 1].transfer_s = 0.0;
            stages[at - 1].transfer_busy_s = 0.0;
        }
    }
    let mut compute = Vec::with_capacity(stages.len());
    for stage in &mut stages {
        let (input_gradient_s, weight_gradient_s) = halves_s(stage, recompute);
        if peaks.splits_backward {
            stage.exposed_grad_reduce_s =
                stage.grad_reduce_s.min(stage.exposed_grad_reduce_s + unhidden_s(stage, recompute, weight_gradient_s));
        }
        compute.push(StageTimes {
            input_gradient_s,
            weight_gradient_s,
            ..StageTimes::new(stage.forward_s, stage.backward_s)
        });
    }
    let messages: Vec<Transfer> = (stages.iter())
        .map(|stage| Transfer {
            busy_s: stage.transfer_busy_s,
            latency_s: (stage.transfer_s - stage.transfer_busy_s).max(0.0),
        })
        .collect();
    let costs = Costs {
        compute,
        activation: messages.clone(),
        gradient: messages,
        gradient_sync_s: vec![0.0; stages.len()],
        optimizer_s: vec![0.0; stages.len()],
    };
    let mut step_s = sweep.step_s(orders, &costs, Links::Queued)?;
    for own in &peaks.stages {
        step_s = step_s.max(synchronise(&mut stages, own, sweep.last_backward_s()));
    }
    let (mut shortfall_bytes, mut missing_part) = (0.0_f64, 0.0_f64);
    for (own, moments) in peaks.stages.iter().zip(&peaks.moments) {
        let held = |stage: &StageCost, (kept, again): (u32, u32)| {
            f64::from(kept) * stage.memory.saved_activation_bytes + f64::from(again) * stage.memory.recomputed_bytes
        };
        let bytes = |moment: &Vec<(u32, u32)>| -> f64 {
            own.iter().zip(moment).map(|(&stage, &counts)| held(&stages[stage], counts)).sum()
        };
        // The first of several that hold as much.
        let Some(fullest) = moments.iter().rev().max_by(|a, b| bytes(a).total_cmp(&bytes(b))) else { continue };
        for (&stage, &counts) in own.iter().zip(fullest) {
            stages[stage].memory.activations_bytes = held(&stages[stage], counts);
        }
        let held_bytes: f64 = own.iter().map(|&stage| stages[stage].memory.total_bytes()).sum();
        let capacity_bytes = stages[own[0]].capacity_bytes;
        if held_bytes > capacity_bytes * (1.0 - ROUNDING) {
            let lacking = (held_bytes - capacity_bytes).max(f64::MIN_POSITIVE);
            shortfall_bytes = shortfall_bytes.max(lacking);
            missing_part = missing_part.max(lacking / capacity_bytes.max(1.0));
        }
    }
    Ok(Run { step_s, in_flight: peaks.in_flight(), stages, shortfall_bytes, missing_part })
}

/// Lets the stages of one group sum their gradients, and returns when all have.
///
/// They share the group's ports, so they come one after the other, as their last backwards end. Messages of one stage go
/// out in the order in which they are ready; where the ports are free from `t` on, they are done at the later of when they
/// are without others, and `t` with all of their time. Each stage's part behind its last backward is made to say that.
fn synchronise(stages: &mut [StageCost], own: &[usize], last_backward_s: &[f64]) -> f64 {
    let mut by_end = own.to_vec();
    by_end.sort_by(|&a, &b| last_backward_s[a].total_cmp(&last_backward_s[b]).then(b.cmp(&a)));
    let mut done_s: f64 = 0.0;
    for stage in by_end {
        let (price, last_s) = (&mut stages[stage], last_backward_s[stage]);
        if price.grad_reduce_s > 0.0 {
            price.exposed_grad_reduce_s = price.exposed_grad_reduce_s.max(done_s + price.grad_reduce_s - last_s);
            done_s = last_s + price.exposed_grad_reduce_s;
        }
    }
    done_s
}

/// How long actions of these stages take, for orders that are fitted to that; stages of one rank send each other nothing.
pub(super) fn durations(stages: &[StageCost], rank_of_stage: &[u32], recompute: bool) -> Durations {
    let halves: Vec<(f64, f64)> = stages.iter().map(|stage| halves_s(stage, recompute)).collect();
    let sending = stages.iter().zip(rank_of_stage.windows(2)).filter(|(_, ranks)| ranks[0] != ranks[1]);
    Durations {
        forward_s: stages.iter().map(|stage| stage.forward_s).collect(),
        input_gradient_s: halves.iter().map(|half| half.0).collect(),
        weight_gradient_s: halves.iter().map(|half| half.1).collect(),
        transfer_s: sending.map(|(stage, _)| stage.transfer_s).fold(0.0, f64::max),
    }
}

/// Prices stages of groups whose numbers of devices don't change.
pub(super) struct Prices<'a> {
    pricer: PlanEvaluator<'a>,
    micro_batch: u32,
    recompute: bool,
    rank_of_stage: Vec<u32>,
    footprints: Vec<Vec<(u32, u32)>>,
    /// By stage, and the cuts around it.
    known: FxHashMap<(usize, usize, usize), StageCost>,
}

impl<'a> Prices<'a> {
    pub(super) fn new(
        (model, cluster, settings): (&'a LayerSums, &'a Cluster, &'a Settings),
        micro_batch: u32,
        recompute: bool,
        rank_of_stage: &[u32],
        footprints: Vec<Vec<(u32, u32)>>,
    ) -> Self {
        let pricer = PlanEvaluator::new(model, cluster, settings);
        let known = FxHashMap::default();
        Self { pricer, micro_batch, recompute, rank_of_stage: rank_of_stage.to_vec(), footprints, known }
    }

    /// The same for groups of other devices.
    pub(super) fn regroup(&mut self, footprints: Vec<Vec<(u32, u32)>>) {
        self.footprints = footprints;
        self.known.clear();
    }

    /// What each stage between these cuts costs, as if it had devices of its own.
    ///
    /// # Errors
    /// [`Error::Argument`] if the devices of a group can't share the micro-batch.
    pub(super) fn of(&mut self, cuts: &[usize]) -> Result<Vec<StageCost>> {
        if self.pricer.shares_weights() {
            // What a stage sums and holds depends on where all others are.
            let stages = (0..self.rank_of_stage.len()).map(|at| self.choice(at, cuts[at], cuts[at + 1])).collect();
            let plan = CandidatePlan { micro_batch: self.micro_batch, recompute: self.recompute, stages };
            return self.pricer.stages_of(&plan, Some(&self.rank_of_stage));
        }
        (0..self.rank_of_stage.len()).map(|stage| self.stage(stage, cuts[stage], cuts[stage + 1])).collect()
    }

    fn choice(&self, at: usize, begin: usize, end: usize) -> StageCandidate {
        let footprint = self.footprints[self.rank_of_stage[at] as usize].clone();
        StageCandidate { begin, end, footprint, max_in_flight: 1 }
    }

    fn stage(&mut self, stage: usize, begin: usize, end: usize) -> Result<StageCost> {
        if let Some(price) = self.known.get(&(stage, begin, end)) {
            return Ok(price.clone());
        }
        // Its price depends on the devices of the next stage, and not on what that runs.
        let mut stages = vec![self.choice(stage, begin, end)];
        if stage + 1 < self.rank_of_stage.len() {
            stages.push(self.choice(stage + 1, end, end));
        }
        let plan = CandidatePlan { micro_batch: self.micro_batch, recompute: self.recompute, stages };
        let price = self.pricer.stages(&plan)?.swap_remove(0);
        self.known.insert((stage, begin, end), price.clone());
        Ok(price)
    }
}

/// The price of one stage between every two neighbouring cuts of `model`, on these devices, run in these orders, for the
/// first of the micro-batch sizes and the first choice about recomputation.
///
/// # Errors
/// [`Error::Argument`] if the orders are for other stages or micro-batches, stages of one rank name other devices than
/// each other or those of two ranks the same, or replicas can't share the micro-batch; [`Error::Schedule`] if the orders
/// wait for each other.
pub fn evaluate(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    devices: &[Vec<u32>],
    orders: &Schedule,
) -> Result<(u32, bool, Run)> {
    settings.check()?;
    cluster.check()?;
    let (Some(&micro_batch), Some(&recompute)) = (settings.micro_batch_sizes.first(), settings.recompute.first())
    else {
        return Err(Error::argument("there is no micro-batch size to choose from", "give one"));
    };
    let micro_batches = settings.global_batch / micro_batch;
    if orders.rank_of_stage.len() != devices.len() || orders.total_micro_batches() != micro_batches {
        return Err(Error::argument(
            format!(
                "`{}` runs {} stages and {} micro-batches, but there are {} stages and {micro_batches} micro-batches",
                orders.name,
                orders.rank_of_stage.len(),
                orders.total_micro_batches(),
                devices.len(),
            ),
            "give each stage of the schedule its layers and its devices",
        ));
    }
    let footprints = footprints(cluster, devices, orders)?;
    let mut prices = Prices::new((model, cluster, settings), micro_batch, recompute, &orders.rank_of_stage, footprints);
    let cuts: Vec<usize> = (0..=devices.len()).collect();
    let stages = prices.of(&cuts)?;
    Ok((micro_batch, recompute, run(orders, &Peaks::of(orders), stages, recompute, &mut Sweep::default())?))
}

/// Devices of each rank as numbers of devices by machine.
pub(super) fn footprints(cluster: &Cluster, devices: &[Vec<u32>], orders: &Schedule) -> Result<Vec<Vec<(u32, u32)>>> {
    let mut rank_of_device: FxHashMap<u32, u32> = FxHashMap::default();
    let mut footprints: Vec<Vec<(u32, u32)>> = vec![Vec::new(); orders.orders.len()];
    let mut first_of_rank: FxHashMap<u32, usize> = FxHashMap::default();
    for (stage, (devices, &rank)) in devices.iter().zip(&orders.rank_of_stage).enumerate() {
        let first = *first_of_rank.entry(rank).or_insert(stage);
        if devices.is_empty() {
            return Err(Error::argument(format!("stage {stage} has no devices"), "give it at least one"));
        }
        for &device in devices {
            if device >= cluster.devices() {
                return Err(Error::argument(
                    format!("stage {stage} names device {device}, but the cluster has {} devices", cluster.devices()),
                    "devices are numbered from 0, machine by machine",
                ));
            }
            let known = *rank_of_device.entry(device).or_insert(rank);
            if known != rank {
                return Err(Error::argument(
                    format!("device {device} is on stages of rank {known} and of rank {rank} of `{}`", orders.name),
                    "a device may hold several stages only if one rank of the schedule runs them",
                ));
            }
        }
        if first != stage {
            continue;
        }
        footprints[rank as usize] = cluster.footprint(devices);
        let distinct: u32 = footprints[rank as usize].iter().map(|&(_, count)| count).sum();
        if distinct as usize != devices.len() {
            return Err(Error::argument(format!("stage {stage} names a device twice"), "name each once"));
        }
    }
    for (stage, (named, rank)) in devices.iter().zip(&orders.rank_of_stage).enumerate() {
        let first = first_of_rank[rank];
        if *named != devices[first] {
            return Err(Error::argument(
                format!("stages {first} and {stage} are both on rank {rank} of `{}`, on other devices", orders.name),
                "give all stages of a rank the same devices, in the same order",
            ));
        }
    }
    Ok(footprints)
}
