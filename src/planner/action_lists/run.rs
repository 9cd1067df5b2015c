//! Step time and memory of a plan that runs an arbitrary schedule, also with several stages per device.

use crate::planner::effort::action_lists as effort;
use crate::planner::hybrid::{CandidatePlan, PlanEvaluator, Settings, StageCandidate, StageCost};
use rustc_hash::FxHashMap;

use crate::cost::LayerSums;
use crate::cost::network::Cluster;
use crate::error::{Error, Result};
use crate::schedule::{Durations, Kind, Schedule};
use crate::simulate::{Costs, Links, StageTimes, Sweep, Transfer};

/// Result of simulating a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Simulated step, in seconds.
    pub step_s: f64,
    /// Costs of each stage. Its activations are those at the moment when its group needs most memory.
    pub stages: Vec<StageCost>,
    /// The largest number of micro-batches whose activations each stage holds at a time.
    pub in_flight: Vec<u32>,
    /// Memory that the fullest device lacks, in bytes. 0 if the plan fits.
    pub shortfall_bytes: f64,
    /// `shortfall_bytes` as a share of the device's memory.
    missing_part: f64,
}

/// Relative margin below the capacity at which a device counts as full, since sums in another order round differently.
const ROUNDING: f64 = 1e-12;

/// Relative amount by which one number must be smaller than another to count. Smaller differences are rounding.
pub(super) const SMALLER: f64 = 1e-9;

impl Run {
    /// Returns whether every device has enough memory.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.shortfall_bytes == 0.0
    }

    /// Returns the objective of the search: the step, with a penalty for missing memory.
    #[must_use]
    // The penalty is finite, so that the search can pass through plans that lack a little memory.
    pub fn score(&self) -> f64 {
        self.step_s * (1.0 + effort::SHORTFALL_PENALTY * self.missing_part)
    }

    /// Returns whether this is the better answer: it lacks less memory or, if both lack the same, has the shorter step.
    #[must_use]
    pub fn is_better_than(&self, other: &Self) -> bool {
        (self.shortfall_bytes, self.step_s) < (other.shortfall_bytes, other.step_s)
    }

    /// Returns whether this is the better answer by more than rounding.
    #[must_use]
    pub fn is_clearly_better_than(&self, other: &Self) -> bool {
        let is_smaller = |one: f64, other: f64| one < other * (1.0 - SMALLER);
        is_smaller(self.shortfall_bytes, other.shortfall_bytes)
            || (self.shortfall_bytes <= other.shortfall_bytes && is_smaller(self.step_s, other.step_s))
    }
}

/// Maximum numbers of micro-batches that the groups of a schedule hold at once.
///
/// A rank works on one action at a time, so its order alone decides these numbers, without a simulation.
#[derive(Debug)]
pub(super) struct Peaks {
    /// Stages of each rank.
    stages: Vec<Vec<usize>>,
    /// Candidates for the fullest moment of each rank. A moment gives for each stage of the rank the number of
    /// micro-batches that it keeps, and the number whose activations it has recomputed.
    moments: Vec<Vec<Vec<(u32, u32)>>>,
    /// Whether any backward pass is split into input gradients and weight gradients.
    splits_backward: bool,
}

impl Peaks {
    /// Finds the fullest moments of all ranks of a schedule.
    pub(super) fn of(schedule: &Schedule) -> Self {
        let stages: Vec<Vec<usize>> = (0..schedule.ranks())
            .map(|rank| (0..schedule.rank_of_stage.len()).filter(|&s| schedule.rank_of_stage[s] == rank).collect())
            .collect();
        let moments = schedule.action_lists.iter().zip(&stages).map(|(order, stages)| moments(order, stages)).collect();
        let splits_backward = schedule.action_lists.iter().flatten().any(|action| action.kind == Kind::WeightGradient);
        Self { stages, moments, splits_backward }
    }

    /// Returns for each stage the largest number of micro-batches that it keeps.
    fn in_flight(&self) -> Vec<u32> {
        let mut max = vec![0; self.stages.iter().map(Vec::len).sum()];
        for (stages, moments) in self.stages.iter().zip(&self.moments) {
            for (place, &stage) in stages.iter().enumerate() {
                max[stage] = moments.iter().map(|moment| moment[place].0).max().unwrap_or(0);
            }
        }
        max
    }
}

/// Returns the numbers of kept and of recomputed micro-batches of each of `stages`, at all moments that no other moment
/// exceeds in every number.
fn moments(order: &[crate::schedule::Action], stages: &[usize]) -> Vec<Vec<(u32, u32)>> {
    let place = |stage: u32| stages.iter().position(|&own| own == stage as usize);
    let mut now = vec![(0_u32, 0_u32); stages.len()];
    let mut max: Vec<Vec<(u32, u32)>> = Vec::new();
    for action in order {
        // Overlapped actions are a forward and a backward pass, which both count.
        for half in action.halves() {
            let Some(place) = place(half.stage) else { continue };
            match half.kind {
                Kind::Forward => now[place].0 += 1,
                Kind::Backward | Kind::InputGradient => now[place].1 += 1,
                Kind::WeightGradient | Kind::Overlapped => {}
            }
        }
        // Bytes per micro-batch differ from stage to stage, so no single moment is known to be the fullest. All moments
        // that are not dominated by another one are kept.
        let below = |a: &[(u32, u32)], b: &[(u32, u32)]| a.iter().zip(b).all(|(a, b)| a.0 <= b.0 && a.1 <= b.1);
        if !max.iter().any(|moment| below(&now, moment)) {
            max.retain(|moment| !below(moment, &now));
            max.push(now.clone());
        }
        for half in action.halves() {
            let Some(place) = place(half.stage) else { continue };
            // A split backward keeps the activations until its weight gradient.
            if matches!(half.kind, Kind::Backward | Kind::WeightGradient) {
                now[place] = (now[place].0.saturating_sub(1), now[place].1.saturating_sub(1));
            }
        }
    }
    max
}

/// Returns the seconds of the input gradient and of the weight gradient. Without measurements, each is half of the
/// backward pass. With recomputation the repeated forward pass is part of the input gradient.
fn halves_s(stage: &StageCost) -> (f64, f64) {
    let repeated_s = stage.repeated_s();
    let half_s = (stage.backward_s - repeated_s) / 2.0;
    (repeated_s + stage.input_gradient_s.unwrap_or(half_s), stage.weight_gradient_s.unwrap_or(half_s))
}

/// Returns the part of a whole backward pass that can overlap with the all-reduce, but that a weight gradient alone
/// does not have.
fn unhidden_s(stage: &StageCost, weight_gradient_s: f64) -> f64 {
    (stage.backward_s - stage.repeated_s() - weight_gradient_s).max(0.0)
}

/// Runs evaluated stages in the order of a schedule.
///
/// `stages` are evaluated as if each had devices of its own. This function corrects that: stages of one group send each
/// other nothing, only the last weight gradient overlaps with the all-reduce if backward passes are split, all-reduces
/// of a group run one after another, and memory is counted at the fullest moment.
pub(super) fn run(schedule: &Schedule, peaks: &Peaks, mut stages: Vec<StageCost>, sweep: &mut Sweep) -> Result<Run> {
    // Consecutive stages of one rank are on the same devices: V shapes turn around without a transfer.
    for at in 1..stages.len() {
        if schedule.rank_of_stage[at - 1] == schedule.rank_of_stage[at] {
            stages[at - 1].transfer_s = 0.0;
            stages[at - 1].transfer_busy_s = 0.0;
        }
    }
    let mut compute = Vec::with_capacity(stages.len());
    for stage in &mut stages {
        let (input_gradient_s, weight_gradient_s) = halves_s(stage);
        if peaks.splits_backward {
            // The evaluated tail assumes that a whole backward pass hides the all-reduce. What the weight gradient is
            // shorter is exposed in addition, up to the whole all-reduce.
            stage.exposed_grad_reduce_s =
                stage.grad_reduce_s.min(stage.exposed_grad_reduce_s + unhidden_s(stage, weight_gradient_s));
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
    // All-reduces are added below instead, because the simulation does not know that stages of a group share their
    // ports.
    let costs = Costs {
        compute,
        activation: messages.clone(),
        gradient: messages,
        gradient_sync_s: vec![0.0; stages.len()],
        optimizer_s: vec![0.0; stages.len()],
    };
    let mut step_s = sweep.step_s(schedule, &costs, Links::Queued)?;
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
        // Of several moments with equal memory, take the first one. `max_by` returns the last one, hence the reversal.
        let Some(fullest) = moments.iter().rev().max_by(|a, b| bytes(a).total_cmp(&bytes(b))) else { continue };
        for (&stage, &counts) in own.iter().zip(fullest) {
            stages[stage].memory.activations_bytes = held(&stages[stage], counts);
        }
        let held_bytes: f64 = own.iter().map(|&stage| stages[stage].memory.total_bytes()).sum();
        let capacity_bytes = stages[own[0]].capacity_bytes;
        // The margin makes the result independent of the order in which the memory of the stages was summed.
        if held_bytes > capacity_bytes * (1.0 - ROUNDING) {
            let lacking = (held_bytes - capacity_bytes).max(f64::MIN_POSITIVE);
            shortfall_bytes = shortfall_bytes.max(lacking);
            missing_part = missing_part.max(lacking / capacity_bytes.max(1.0));
        }
    }
    Ok(Run { step_s, in_flight: peaks.in_flight(), stages, shortfall_bytes, missing_part })
}

/// Adds the all-reduces of the stages of one group, and returns the time at which all have ended.
///
/// The stages share the group's ports, so their all-reduces run one after another, in the order in which their last
/// backward passes end. Messages of one stage are sent in the order in which they are ready. If the ports are free from
/// time `t` on, the all-reduce ends at the later of two times: its end without other stages, and `t` plus its whole
/// duration. The tail of each stage is extended accordingly.
fn synchronise(stages: &mut [StageCost], own: &[usize], last_backward_s: &[f64]) -> f64 {
    let mut by_end = own.to_vec();
    by_end.sort_by(|&a, &b| last_backward_s[a].total_cmp(&last_backward_s[b]).then(b.cmp(&a)));
    let mut done_s: f64 = 0.0;
    for stage in by_end {
        let (cost, last_s) = (&mut stages[stage], last_backward_s[stage]);
        if cost.grad_reduce_s > 0.0 {
            cost.exposed_grad_reduce_s = cost.exposed_grad_reduce_s.max(done_s + cost.grad_reduce_s - last_s);
            done_s = last_s + cost.exposed_grad_reduce_s;
        }
    }
    done_s
}

/// Returns the durations of all actions, for schedules that are fitted to times. Stages of one rank send each other
/// nothing.
pub(super) fn durations(stages: &[StageCost], rank_of_stage: &[u32]) -> Durations {
    let halves: Vec<(f64, f64)> = stages.iter().map(halves_s).collect();
    let sending = stages.iter().zip(rank_of_stage.windows(2)).filter(|(_, ranks)| ranks[0] != ranks[1]);
    // The schedule generators take a single transfer time, so use the longest.
    Durations {
        forward_s: stages.iter().map(|stage| stage.forward_s).collect(),
        input_gradient_s: halves.iter().map(|half| half.0).collect(),
        weight_gradient_s: halves.iter().map(|half| half.1).collect(),
        transfer_s: sending.map(|(stage, _)| stage.transfer_s).fold(0.0, f64::max),
    }
}

/// Evaluates and caches the costs of stages, for groups with fixed devices.
pub(super) struct CostCache<'a> {
    evaluator: PlanEvaluator<'a>,
    micro_batch: u32,
    /// Whether each stage recomputes its activations.
    recompute: Vec<bool>,
    rank_of_stage: Vec<u32>,
    footprints: Vec<Vec<(u32, u32)>>,
    /// Cached costs by stage and the cuts around it.
    known: FxHashMap<(usize, usize, usize), StageCost>,
}

impl<'a> CostCache<'a> {
    pub(super) fn new(
        (model, cluster, settings): (&'a LayerSums, &'a Cluster, &'a Settings),
        micro_batch: u32,
        recompute: Vec<bool>,
        rank_of_stage: &[u32],
        footprints: Vec<Vec<(u32, u32)>>,
    ) -> Self {
        let evaluator = PlanEvaluator::new(model, cluster, settings);
        let known = FxHashMap::default();
        Self { evaluator, micro_batch, recompute, rank_of_stage: rank_of_stage.to_vec(), footprints, known }
    }

    /// Replaces the devices of the groups, and drops all cached costs.
    pub(super) fn regroup(&mut self, footprints: Vec<Vec<(u32, u32)>>) {
        self.footprints = footprints;
        self.known.clear();
    }

    /// Returns the costs of each stage between these cuts, as if it had devices of its own.
    ///
    /// # Errors
    /// Returns [`Error::Argument`] if the devices of a group can't share the micro-batch.
    pub(super) fn of(&mut self, cuts: &[usize]) -> Result<Vec<StageCost>> {
        if self.evaluator.shares_weights() {
            // With tied weights, the all-reduce and the memory of a stage depend on where the other layers of the tie
            // are, so stages can't be evaluated and cached one by one.
            let stages = (0..self.rank_of_stage.len()).map(|at| self.choice(at, cuts[at], cuts[at + 1])).collect();
            let plan = CandidatePlan { micro_batch: self.micro_batch, stages };
            return self.evaluator.stages_of(&plan, Some(&self.rank_of_stage));
        }
        (0..self.rank_of_stage.len()).map(|stage| self.stage(stage, cuts[stage], cuts[stage + 1])).collect()
    }

    /// Returns a stage with the devices of its group.
    fn choice(&self, at: usize, begin: usize, end: usize) -> StageCandidate {
        let footprint = self.footprints[self.rank_of_stage[at] as usize].clone();
        StageCandidate { begin, end, footprint, max_in_flight: 1, recompute: self.recompute[at] }
    }

    fn stage(&mut self, stage: usize, begin: usize, end: usize) -> Result<StageCost> {
        if let Some(cost) = self.known.get(&(stage, begin, end)) {
            return Ok(cost.clone());
        }
        // The cost includes the transfer to the next stage, which depends on that stage's devices but not on its
        // layers. So an empty stage stands for it.
        let mut stages = vec![self.choice(stage, begin, end)];
        if stage + 1 < self.rank_of_stage.len() {
            stages.push(self.choice(stage + 1, end, end));
        }
        let plan = CandidatePlan { micro_batch: self.micro_batch, stages };
        let cost = self.evaluator.stages(&plan)?.swap_remove(0);
        self.known.insert((stage, begin, end), cost.clone());
        Ok(cost)
    }
}

/// Evaluates one stage between every two neighboring cuts of `model`, on these devices, in the order of a schedule.
///
/// `recompute` has whether each stage recomputes its activations. Uses the first micro-batch size of the settings, and
/// returns it with the run.
///
/// # Errors
/// Returns [`Error::Argument`] if the schedule has other stages or micro-batches, if stages of one rank are on
/// different devices or stages of two ranks on the same, or if replicas can't share the micro-batch. Returns
/// [`Error::Schedule`] if the actions wait for each other.
pub fn evaluate(
    model: &LayerSums,
    cluster: &Cluster,
    settings: &Settings,
    devices: &[Vec<u32>],
    schedule: &Schedule,
    recompute: Vec<bool>,
) -> Result<(u32, Run)> {
    settings.check()?;
    cluster.check()?;
    let Some(&micro_batch) = settings.pipeline_micro_batch_sizes.first() else {
        return Err(Error::argument(
            "there is no micro-batch size to choose from",
            "allow at least one micro-batch size",
        ));
    };
    let micro_batches = settings.global_batch / micro_batch;
    if recompute.len() != devices.len() {
        return Err(Error::argument(
            format!("recompute has {} values, but the plan has {} stages", recompute.len(), devices.len()),
            "give one value for each stage",
        ));
    }
    if schedule.rank_of_stage.len() != devices.len() || schedule.total_micro_batches() != micro_batches {
        return Err(Error::argument(
            format!(
                "`{}` runs {} stages and {} micro-batches, but there are {} stages and {micro_batches} micro-batches",
                schedule.name,
                schedule.rank_of_stage.len(),
                schedule.total_micro_batches(),
                devices.len(),
            ),
            "give each stage of the schedule its layers and its devices",
        ));
    }
    let footprints = footprints(cluster, devices, schedule)?;
    let mut cost_cache =
        CostCache::new((model, cluster, settings), micro_batch, recompute, &schedule.rank_of_stage, footprints);
    let cuts: Vec<usize> = (0..=devices.len()).collect();
    let stages = cost_cache.of(&cuts)?;
    Ok((micro_batch, run(schedule, &Peaks::of(schedule), stages, &mut Sweep::default())?))
}

/// Returns the numbers of devices by node of each rank. Checks that ranks and devices match.
pub(super) fn footprints(cluster: &Cluster, devices: &[Vec<u32>], schedule: &Schedule) -> Result<Vec<Vec<(u32, u32)>>> {
    let mut rank_of_device: FxHashMap<u32, u32> = FxHashMap::default();
    let mut footprints: Vec<Vec<(u32, u32)>> = vec![Vec::new(); schedule.action_lists.len()];
    let mut first_of_rank: FxHashMap<u32, usize> = FxHashMap::default();
    for (stage, (devices, &rank)) in devices.iter().zip(&schedule.rank_of_stage).enumerate() {
        let first = *first_of_rank.entry(rank).or_insert(stage);
        if devices.is_empty() {
            return Err(Error::argument(format!("stage {stage} has no devices"), "add at least one device"));
        }
        for &device in devices {
            if device >= cluster.devices() {
                return Err(Error::argument(
                    format!("stage {stage} names device {device}, but the cluster has {} devices", cluster.devices()),
                    "number the devices from 0, node by node",
                ));
            }
            let known = *rank_of_device.entry(device).or_insert(rank);
            if known != rank {
                return Err(Error::argument(
                    format!("device {device} is on stages of rank {known} and of rank {rank} of `{}`", schedule.name),
                    "use a device for stages of one rank only",
                ));
            }
        }
        if first != stage {
            continue;
        }
        footprints[rank as usize] = cluster.footprint(devices);
        let distinct: u32 = footprints[rank as usize].iter().map(|&(_, count)| count).sum();
        if distinct as usize != devices.len() {
            return Err(Error::argument(format!("stage {stage} names a device twice"), "name each device once"));
        }
    }
    // Device i of a group holds replica i of all its stages, so their lists must be equal.
    for (stage, (named, rank)) in devices.iter().zip(&schedule.rank_of_stage).enumerate() {
        let first = first_of_rank[rank];
        if *named != devices[first] {
            return Err(Error::argument(
                format!(
                    "stages {first} and {stage} are both on rank {rank} of `{}`, but on different devices",
                    schedule.name
                ),
                "give all stages of a rank the same devices, in the same order",
            ));
        }
    }
    Ok(footprints)
}
