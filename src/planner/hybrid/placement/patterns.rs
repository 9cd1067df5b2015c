//! Pattern plans: whole families of placements that need no search, with the best cuts for each.
//!
//! A pattern orders some nodes, divides the order into *blocks* of nodes, and lists devices in turn inside each block
//! (`device_lists`). Stages take consecutive devices of that list. With blocks of one node it fills node after node
//! (DAPPLE's *append first*). With one block of all nodes, each stage takes an equal part of every node (*scatter
//! first*):
//!
//! ```text
//! nodes         0 1 2 3         blocks of one    0 0 | 1 1 | 2 2 | 3 3
//! 2 devices each, 4 stages      blocks of two    0 1 | 0 1 | 2 3 | 2 3
//!                               one block        0 1 | 2 3 | 0 1 | 2 3
//! ```
//!
//! The cuts follow from a limit on the longest stage, which is bisected (`pattern_cuts`).

use crate::planner::effort::placement;
use crate::planner::hybrid::{
    search::{
        suffix_search::RelaxedPlan,
        unscheduled_plan::{PlanScorer, UnscheduledPlan},
    },
    subproblem::Subproblem,
};
use std::collections::BTreeMap;
use std::sync::Arc;

use super::device_lists::listings;
use super::pattern_cuts::{Reached, Shape, whole_s};

use rayon::prelude::*;
use rustc_hash::FxHashSet;

use crate::control::Control;
use crate::cost::LayerSums;
use crate::cost::network::Cluster;

/// Distribution of the devices of a list over the stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Shares {
    /// The same number of devices for each stage.
    Even(u32),
    /// All devices of the list. If they do not divide evenly, the first stages take one more.
    All,
    /// The first number for the first stage, each device on another node if possible, and the second for each other
    /// stage.
    FewFirst(u32, u32),
    /// The first number for the last stage, each device on another node if possible, and the second for each other
    /// stage.
    FewLast(u32, u32),
}

/// A pattern: a list of devices, a number of stages, and the distribution of devices. It fits any micro-batch size.
#[derive(Debug, Clone, Copy)]
struct Pattern {
    listing: usize,
    stages: usize,
    shares: Shares,
}

/// A pattern before its cuts are chosen.
struct Shaped {
    pattern: Pattern,
    /// Indices of the micro-batch sizes that need cuts.
    tasks: Vec<usize>,
    shape: Shape,
    /// Unscheduled plan without devices, to score cuts with.
    unscheduled: UnscheduledPlan,
}

/// A pattern with its best cuts for one micro-batch size.
struct FoundPlan {
    path_s: f64,
    pattern: Pattern,
    cuts: Vec<u32>,
}

/// All patterns of a planning problem.
pub(crate) struct Patterns<'a> {
    pub(super) tasks: &'a [&'a Subproblem<'a>],
    pub(super) cluster: &'a Cluster,
    pub(super) model: &'a LayerSums,
    /// Line of nested cuts, thinned to at most [`placement::MAX_PATTERN_CUTS`].
    pub(super) line: Vec<u32>,
    /// Layers between each cut of the line and the one before it, last first.
    pub(super) layers: Vec<Vec<u32>>,
    /// Whether the line, from its end on, adds layers in the order of the backward pass.
    pub(super) in_order: bool,
    /// Lists of devices. Each entry is the node of a device.
    pub(super) listings: Vec<Vec<u32>>,
    /// Lower bound for each micro-batch size: the time of all micro-batches on one device of the highest speed.
    pub(super) min_s: Vec<f64>,
}

impl<'a> Patterns<'a> {
    pub(crate) fn new(tasks: &'a [&'a Subproblem<'a>], line: &[u32]) -> Option<Self> {
        let &&Subproblem { model, cluster, .. } = tasks.first()?;
        let step = line.len().div_ceil(placement::MAX_PATTERN_CUTS);
        let whole = line.len() - 1;
        let line: Vec<u32> = (line.iter().enumerate())
            .filter(|(at, _)| at.is_multiple_of(step) || *at == whole)
            .map(|(_, &cut)| cut)
            .collect();
        let layers: Vec<Vec<u32>> = std::iter::once(Vec::new())
            .chain(line.windows(2).map(|two| model.layers_between(two[0] as usize, two[1] as usize).collect()))
            .collect();
        let in_order = layers.iter().rev().flatten().is_sorted_by(|a, b| a > b);
        let speed = cluster.nodes.iter().map(|node| node.speed).fold(0.0, f64::max);
        let min_s = |task: &Subproblem<'_>| {
            let min_s = task.totals.iter().map(|totals| whole_s(task, totals)).fold(f64::INFINITY, f64::min);
            f64::from(task.micro_batches) * min_s / speed
        };
        let min_s = tasks.iter().map(|task| min_s(task)).collect();
        Some(Self { tasks, cluster, model, line, layers, in_order, listings: listings(cluster), min_s })
    }

    /// Returns the plans with the shortest paths for each micro-batch size and number of stages.
    ///
    /// The best plan of each comes first, shortest first, then the second best ones. Paths are shorter than `limit_s`,
    /// and than `hopeful` times the shortest path of fewer stages. With `is_brief`, only a few patterns are tried.
    pub(crate) fn plans(&self, limit_s: f64, hopeful: f64, is_brief: bool, control: &Control) -> Vec<UnscheduledPlan> {
        let max_stages = self.tasks[0].settings.max_stages as usize;
        let is_many = self.cluster.nodes.len() > placement::MANY_NODES;
        let mut best: BTreeMap<(usize, usize), Vec<FoundPlan>> = BTreeMap::new();
        // Each result lowers the limit for later numbers of stages, so many of their patterns are rejected by a lower
        // bound.
        let mut limit_s = limit_s;
        for stages in placement::STAGE_COUNTS.into_iter().filter(|&stages| stages <= max_stages) {
            // On clusters with many nodes each pattern takes long, so only powers of two and three times these are
            // tried.
            let is_round = stages.is_power_of_two() || (stages.is_multiple_of(3) && (stages / 3).is_power_of_two());
            let listings: Vec<usize> = (self.listings.iter().enumerate())
                .filter(|(_, devices)| {
                    let is_first = stages.is_power_of_two() && devices.len() == self.listings[0].len();
                    stages <= devices.len().min(self.line.len() - 1)
                        && (is_round || !is_many)
                        && (is_first || !is_brief)
                })
                .map(|(listing, _)| listing)
                .collect();
            let shaped: Vec<Vec<Shaped>> = (listings.into_par_iter())
                .map_init(
                    || PlanScorer::new(self.tasks, self.cluster, placement::PATTERN_SYNCS),
                    |scorer, listing| self.of_listing(listing, stages, limit_s, scorer, control),
                )
                .collect();
            // Other nodes, or another order of nodes, often lead to the same stages and links. Such shapes have equal
            // cuts, so each is cut only once.
            let mut shaped: Vec<Shaped> = shaped.into_iter().flatten().collect();
            let mut known: FxHashSet<(Arc<[u64]>, usize)> = FxHashSet::default();
            for Shaped { tasks, shape, .. } in &mut shaped {
                let key = shape.key();
                tasks.retain(|&task| known.insert((key.clone(), task)));
            }
            let found: Vec<Vec<(usize, FoundPlan)>> = (shaped.into_par_iter())
                .map_init(
                    || (PlanScorer::new(self.tasks, self.cluster, placement::PATTERN_SYNCS), Reached::new(limit_s)),
                    |(scorer, reached), shaped| self.of_shape(shaped, limit_s, scorer, reached, control),
                )
                .collect();
            // Limits change only between numbers of stages, never inside the parallel loop, so results do not depend on
            // the number of threads.
            for (task, found) in found.into_iter().flatten() {
                limit_s = limit_s.min(hopeful * found.path_s);
                let kept = best.entry((task, found.pattern.stages)).or_default();
                if kept.iter().all(|other| other.path_s.total_cmp(&found.path_s).is_ne() || other.cuts != found.cuts) {
                    let at = kept.partition_point(|other| other.path_s <= found.path_s);
                    kept.insert(at, found);
                    kept.truncate(placement::PLANS_PER_STAGE_COUNT);
                }
            }
        }
        let mut plans: Vec<(usize, f64, UnscheduledPlan)> = (best.into_iter())
            .flat_map(|((task, _), kept)| kept.into_iter().enumerate().map(move |(rank, found)| (task, rank, found)))
            .filter_map(|(task, rank, found)| {
                let counts = self.counts(found.pattern)?;
                Some((rank, found.path_s, UnscheduledPlan::new(self.cluster, task, found.cuts, counts)))
            })
            .collect();
        plans.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        // In a pattern at most one end stage differs in size from the others. Splitting an end stage reaches further
        // plans.
        let split: Vec<Option<(f64, UnscheduledPlan)>> = (plans.par_iter().take(placement::SPLIT_PLANS))
            .map_init(
                || PlanScorer::new(self.tasks, self.cluster, placement::PATTERN_SYNCS),
                |scorer, (_, path_s, plan)| {
                    if control.should_stop() {
                        None
                    } else {
                        self.split_end_stage(plan, placement::SPLIT_TOLERANCE * path_s, scorer)
                    }
                },
            )
            .collect();
        plans.extend(split.into_iter().flatten().map(|(path_s, plan)| (0, path_s, plan)));
        plans.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        plans.into_iter().map(|(.., plan)| plan).collect()
    }

    /// Places a relaxed plan on each list of devices that is long enough.
    pub(crate) fn placed(&self, task: usize, relaxed_plan: &RelaxedPlan) -> Vec<UnscheduledPlan> {
        let (nodes, all) = (self.cluster.nodes.len(), relaxed_plan.replicas.iter().sum::<u32>() as usize);
        (self.listings.iter())
            .filter(|listing| listing.len() >= all)
            .map(|listing| {
                let mut counts = vec![0; relaxed_plan.replicas.len() * nodes];
                let stages_of = (0..)
                    .zip(&relaxed_plan.replicas)
                    .flat_map(|(stage, &count)| std::iter::repeat_n(stage, count as usize));
                stages_of
                    .zip(listing)
                    .for_each(|(stage, &node): (usize, _)| counts[stage * nodes + node as usize] += 1);
                UnscheduledPlan::new(self.cluster, task, relaxed_plan.cuts.clone(), counts)
            })
            .collect()
    }

    /// Splits the first or the last stage of a plan in two, which share its devices. Returns the best such plan if its
    /// path is shorter than `limit_s`.
    fn split_end_stage(
        &self,
        plan: &UnscheduledPlan,
        limit_s: f64,
        scorer: &mut PlanScorer<'_>,
    ) -> Option<(f64, UnscheduledPlan)> {
        let (task, nodes) = (self.tasks[plan.task], self.cluster.nodes.len());
        if plan.stages() as u64 >= u64::from(task.settings.max_stages) || plan.stages() + 1 >= self.line.len() {
            return None;
        }
        let mut best: Option<(f64, UnscheduledPlan)> = None;
        let mut reached = Reached::new(limit_s);
        for at in [0, plan.stages() - 1] {
            let devices: u32 = plan.row(at).iter().sum();
            let parts = placement::SPLIT_SHARES
                .into_iter()
                .flat_map(|(part, of)| [devices * part / of, (devices * part).div_ceil(of)]);
            for few in parts {
                let is_allowed = |replicas: u32| replicas > 0 && task.totals_index[replicas as usize].is_some();
                if !is_allowed(few) || !is_allowed(devices.saturating_sub(few)) {
                    continue;
                }
                let (mut one, mut other, mut left) = (vec![0; nodes], plan.row(at).to_vec(), few);
                for (one, other) in one.iter_mut().zip(&mut other) {
                    *one = left.min(*other);
                    *other -= *one;
                    left -= *one;
                }
                let rows = (0..plan.stages())
                    .flat_map(|stage| if stage == at { vec![&one[..], &other[..]] } else { vec![plan.row(stage)] });
                let counts: Vec<u32> = rows.flatten().copied().collect();
                let mut unscheduled = UnscheduledPlan::new(self.cluster, plan.task, vec![0; plan.stages() + 2], counts);
                let limit_s = best.as_ref().map_or(limit_s, |(path_s, _)| *path_s);
                let shape = Shape::of(&mut unscheduled, scorer);
                let Some(cuts) = self.best_cuts(&shape, plan.task, limit_s, &mut reached) else { continue };
                unscheduled.set_cuts(plan.task, cuts);
                let score = scorer.score(&mut unscheduled, limit_s);
                if score.overflow == 0.0 && score.path_s < limit_s {
                    best = Some((score.path_s, unscheduled));
                }
            }
        }
        best
    }

    /// Returns the shapes of all patterns with a given list of devices and number of stages.
    fn of_listing(
        &self,
        listing: usize,
        stages: usize,
        limit_s: f64,
        scorer: &mut PlanScorer<'_>,
        control: &Control,
    ) -> Vec<Shaped> {
        if control.should_stop() {
            return Vec::new();
        }
        let devices = self.listings[listing].len() as u32;
        let is_many = self.cluster.nodes.len() > placement::MANY_NODES;
        let mut wanted: BTreeMap<Shares, Vec<usize>> = BTreeMap::new();
        for (index, task) in self.tasks.iter().enumerate() {
            let mut want = |shares| wanted.entry(shares).or_default().push(index);
            let each = devices / stages as u32;
            if self.min_s[index] / stages as f64 >= limit_s {
                continue; // the longest stage takes at least the mean of all stages
            }
            for replicas in replicas(task, each) {
                want(Shares::Even(replicas));
            }
            let is_allowed = |replicas: u32| task.totals_index[replicas as usize].is_some();
            if !devices.is_multiple_of(stages as u32) && is_allowed(each) && is_allowed(each + 1) {
                want(Shares::All);
            }
            // One end stage on few devices, and the rest shared by the other stages: the first layers often send most.
            let max_stages = if is_many { 2 } else { placement::MAX_STAGES_BESIDE_FEW };
            if (2..=max_stages).contains(&stages) && devices == self.cluster.devices() {
                let doubled = std::iter::successors(Some(1), |few| Some(few * 2)).take_while(|&few| few < each);
                let few = if is_many { doubled.collect() } else { placement::FEW_DEVICES.to_vec() };
                for few in few.into_iter().filter(|&few| few < each && is_allowed(few)) {
                    for replicas in replicas(task, (devices - few) / (stages as u32 - 1)) {
                        want(Shares::FewFirst(few, replicas));
                        want(Shares::FewLast(few, replicas));
                    }
                }
            }
        }
        let mut all = Vec::new();
        for (shares, tasks) in wanted {
            let pattern = Pattern { listing, stages, shares };
            if control.should_stop() {
                return all;
            }
            let Some(counts) = self.counts(pattern) else { continue };
            let mut unscheduled = UnscheduledPlan::new(self.cluster, tasks[0], vec![0; stages + 1], counts);
            let shape = Shape::of(&mut unscheduled, scorer);
            all.push(Shaped { pattern, tasks, shape, unscheduled: unscheduled.without_devices() });
        }
        all
    }

    /// Returns the best cuts of a pattern for each of its micro-batch sizes.
    fn of_shape(
        &self,
        Shaped { pattern, tasks, shape, mut unscheduled }: Shaped,
        limit_s: f64,
        scorer: &mut PlanScorer<'_>,
        reached: &mut Reached,
        control: &Control,
    ) -> Vec<(usize, FoundPlan)> {
        let mut all = Vec::new();
        for task in tasks {
            if control.should_stop() {
                return all;
            }
            let Some(cuts) = self.best_cuts(&shape, task, limit_s, reached) else { continue };
            unscheduled.set_cuts(task, cuts);
            let score = scorer.score(&mut unscheduled, limit_s);
            // Cuts were chosen by stages alone. The path may still reach the limit, or further micro-batches in flight
            // may not fit.
            if score.overflow == 0.0 && score.path_s < limit_s {
                all.push((task, FoundPlan { path_s: score.path_s, pattern, cuts: unscheduled.cuts.clone() }));
            }
        }
        all
    }

    /// Returns the devices of each stage on each node, or `None` if the list has too few devices.
    fn counts(&self, Pattern { listing, stages, shares }: Pattern) -> Option<Vec<u32>> {
        let nodes = self.cluster.nodes.len();
        let listing = &self.listings[listing];
        let mut counts = vec![0; stages * nodes];
        let mut take = |stage: usize, node: u32| counts[stage * nodes + node as usize] += 1;
        match shares {
            Shares::Even(replicas) => {
                let stages_of = (0..stages).flat_map(|stage| std::iter::repeat_n(stage, replicas as usize));
                stages_of.zip(listing).for_each(|(stage, &node)| take(stage, node));
            }
            Shares::All => {
                let (each, more) = (listing.len() / stages, listing.len() % stages);
                let stages_of =
                    (0..stages).flat_map(|stage| std::iter::repeat_n(stage, each + usize::from(stage < more)));
                stages_of.zip(listing).for_each(|(stage, &node)| take(stage, node));
            }
            Shares::FewFirst(few, replicas) | Shares::FewLast(few, replicas) => {
                let is_first = matches!(shares, Shares::FewFirst(..));
                let mut used = vec![0_u32; nodes];
                // The few devices come from the last nodes of the list, one from each in turn, so that their ports
                // share the transfers.
                let mut order: Vec<u32> = Vec::new();
                let mut known = vec![false; nodes];
                for &node in listing.iter().rev() {
                    if !std::mem::replace(&mut known[node as usize], true) {
                        order.push(node);
                    }
                }
                let mut left = few;
                while left > 0 {
                    for &node in &order {
                        if left > 0 && used[node as usize] < self.cluster.nodes[node as usize].devices {
                            used[node as usize] += 1;
                            left -= 1;
                            take(if is_first { 0 } else { stages - 1 }, node);
                        }
                    }
                }
                let others = if is_first { 1..stages } else { 0..stages - 1 };
                let mut skip = used;
                let rest = listing.iter().rev().filter(|&&node| {
                    let skip = &mut skip[node as usize];
                    let is_used = *skip > 0;
                    *skip -= u32::from(is_used);
                    !is_used
                });
                let mut rest: Vec<u32> = rest.copied().collect();
                rest.reverse();
                if rest.len() < others.len() * replicas as usize {
                    return None;
                }
                let stages_of = others.flat_map(|stage| std::iter::repeat_n(stage, replicas as usize));
                stages_of.zip(rest).for_each(|(stage, node)| take(stage, node));
            }
        }
        Some(counts)
    }
}

/// Returns the replica counts to try: the largest allowed count up to `max`, and the smallest count with the same
/// share.
fn replicas(task: &Subproblem<'_>, max: u32) -> Vec<u32> {
    let Some(max) = (1..=max).rev().find(|&replicas| task.totals_index[replicas as usize].is_some()) else {
        return Vec::new();
    };
    let totals_index = task.totals_index[max as usize];
    let fewest = (1..=max).find(|&replicas| task.totals_index[replicas as usize] == totals_index).unwrap_or(max);
    // Fewer replicas with the same samples each compute equally fast, and their all-reduce is shorter.
    if fewest < max { vec![max, fewest] } else { vec![max] }
}
