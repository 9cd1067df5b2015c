//! The label search: from the last stage to the first, over cuts, devices, nodes and numbers of micro-batches in
//! flight.
//!
//! A [`Label`] is a suffix of the pipeline: the cut where it begins, the situation of the nodes, the number of stages
//! and the micro-batches in flight of its first one. Among labels that agree in these, one whose [`Paths`] are nowhere
//! longer dominates the other (docs/proofs.md#dominance). Labels whose bound reaches the threshold are dropped. Prefix
//! tables ([`PrefixBounds`]) give each label the least that any completion adds.
//!
//! With a beam, only the most promising labels of each cut go on. The smallest bound among the others then limits what
//! the pass has proved (docs/proofs.md#a-pass).

use crate::planner::effort::{WorkBudget, passes, tables, work};
use crate::planner::hybrid::{
    bounds::{
        link_bounds::{Links, Span},
        paths::{PathStage, Paths},
        prefix::PrefixBounds,
        relaxed_space::Relaxed,
    },
    evaluate::candidate_plan::{CandidatePlan, StageCandidate},
    placement::placement_space::{PlacementMove, Placements, Space},
    search::{
        labels::{Label, Labels},
        stages_by_end::{Stage, StagesByEnd, lowest_that_fits},
    },
    settings::Recompute,
    subproblem::Subproblem,
};

use crate::control::Control;
use rustc_hash::FxHashMap;

/// Index of the empty suffix.
const ROOT: u32 = 0;

/// Result of a pass.
#[derive(Debug)]
pub(crate) struct PassResult {
    /// Complete plans with the length of their longest path, shortest first. Empty for the relaxed space, whose moves
    /// are no placements.
    pub plans: Vec<(f64, CandidatePlan)>,
    /// Longest path of the shortest complete plan, also in the relaxed space.
    pub shortest_s: f64,
    /// Lower bound on the paths of plans that were dropped for a limit. Infinite if none was.
    pub bound_s: f64,
    /// Number of labels that were created.
    pub labels: u64,
    /// Work of the pass, and the part of it that built tables.
    pub work: u64,
    pub tables: u64,
}

/// A complete plan of the relaxed space, without placement.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RelaxedPlan {
    /// Length of the longest path, in seconds.
    pub path_s: f64,
    /// Cuts between stages, the empty and the full one included.
    pub cuts: Vec<u32>,
    pub replicas: Vec<u32>,
    /// Whether it has a range of replicas that a finer space would split.
    is_open: bool,
}

/// The label search for one micro-batch size.
pub(crate) struct SuffixSearch<'a> {
    pub task: Subproblem<'a>,
    space: Space<'a>,
    /// The relaxed space, if the search space does not have every placement.
    relaxed: Option<Relaxed>,
    /// Shortest plans of the last relaxed pass, ...
    pub relaxed_plans: Vec<RelaxedPlan>,
    /// ... and whether the first of them has a range of replicas that a finer space would split.
    is_open: bool,
}

impl<'a> SuffixSearch<'a> {
    pub(crate) fn new(task: Subproblem<'a>) -> Self {
        let space = Space::new(&task);
        let relaxed = (!space.exact).then(|| Relaxed::new(&task, tables::MAX_JOINED_RANGES));
        Self { task, space, relaxed, relaxed_plans: Vec::new(), is_open: false }
    }

    /// Returns a search that has a relaxed space in any case, for bounds alone, which begins with at most about
    /// `max_ranges` ranges of replica counts.
    pub(crate) fn relaxed(task: Subproblem<'a>, max_ranges: usize) -> Self {
        let relaxed = Relaxed::new(&task, max_ranges);
        Self { relaxed: Some(relaxed), ..Self::new(task) }
    }

    /// Returns whether the search space has every placement, not only node-aligned ones.
    pub(crate) fn exact_placement(&self) -> bool {
        self.space.exact
    }

    /// Returns bounds on the links of all placements, or of those in the search space.
    pub(crate) fn links(&self, all: bool) -> &Links {
        match &self.relaxed {
            Some(relaxed) if all => relaxed.links(),
            _ => self.space.links(),
        }
    }

    /// Runs a pass for plans whose paths are shorter than `threshold_s`. At most `beam` labels of each cut are
    /// extended.
    pub(crate) fn pass(&mut self, threshold_s: f64, beam: usize, effort: WorkBudget, control: &Control) -> PassResult {
        let pass = Pass { task: &self.task, space: &mut self.space, threshold_s, receive_rates: FxHashMap::default() };
        let (mut found, labels) = pass.run(beam, effort, control);
        found.plans = (labels.complete.iter())
            .map(|&id| (labels.all[id as usize].bound_s, self.candidate(&labels.all, id)))
            .collect();
        found
    }

    /// Refines the relaxed space if its shortest plan depends on a range of replicas. Returns whether it was refined.
    pub(crate) fn refine(&mut self) -> bool {
        let is_open = std::mem::take(&mut self.is_open);
        self.relaxed.as_mut().filter(|_| is_open).map(Relaxed::refine).is_some()
    }

    /// Returns whether the relaxed space joins replica counts that differ in samples.
    pub(crate) fn has_joined_ranges(&self) -> bool {
        self.relaxed.as_ref().is_some_and(Relaxed::has_joined_ranges)
    }

    /// Runs a pass over the relaxed space. Returns `None` where the search space has every placement.
    pub(crate) fn relaxed_pass(
        &mut self,
        threshold_s: f64,
        effort: WorkBudget,
        control: &Control,
    ) -> Option<PassResult> {
        let space = self.relaxed.as_mut()?;
        let (found, labels) = Pass { task: &self.task, space, threshold_s, receive_rates: FxHashMap::default() }.run(
            usize::MAX,
            effort,
            control,
        );
        let relaxed_plans: Vec<RelaxedPlan> =
            labels.complete.iter().map(|&id| relaxed_plan(space, &labels.all, id)).collect();
        // A pass that found no plan says nothing about ranges, and the plans of the one before remain useful.
        if let Some(shortest) = relaxed_plans.first() {
            self.is_open = shortest.is_open;
            self.relaxed_plans.clear();
        }
        for relaxed_plan in relaxed_plans {
            // Plans with equal cuts and replicas would be placed on the same devices.
            let is_new =
                |other: &RelaxedPlan| (&other.cuts, &other.replicas) != (&relaxed_plan.cuts, &relaxed_plan.replicas);
            if self.relaxed_plans.len() < passes::RELAXED_PLANS && self.relaxed_plans.iter().all(is_new) {
                self.relaxed_plans.push(relaxed_plan);
            }
        }
        Some(found)
    }

    /// Builds the plan of a complete label from its chain of parents, and assigns devices to its moves.
    fn candidate(&mut self, labels: &[Label], complete: u32) -> CandidatePlan {
        let mut moves: Vec<PlacementMove> = Vec::new();
        let mut stages: Vec<StageCandidate> = Vec::new();
        let mut id = complete;
        while id != ROOT {
            let label = &labels[id as usize];
            let parent = &labels[label.parent as usize];
            moves.push(self.space.moves(parent.situation)[label.move_index as usize].clone());
            stages.push(StageCandidate {
                begin: label.cut as usize,
                end: parent.cut as usize,
                footprint: Vec::new(),
                max_in_flight: label.max_in_flight,
                recompute: label.recompute,
            });
            id = label.parent;
        }
        moves.reverse(); // made from the last stage to the first
        // Where the number in flight is undecided, take the largest one of its range that does not grow along the
        // stages.
        let mut max = u32::MAX;
        for stage in &mut stages {
            max = max.min(stage.max_in_flight);
            stage.max_in_flight = max;
        }
        for (stage, footprint) in stages.iter_mut().zip(self.space.devices(&moves)) {
            stage.footprint = footprint;
        }
        CandidatePlan { micro_batch: self.task.micro_batch, stages }
    }
}

/// Returns the plan of the relaxed space that a complete label stands for.
fn relaxed_plan(space: &mut Relaxed, labels: &[Label], complete: u32) -> RelaxedPlan {
    let path_s = labels[complete as usize].bound_s;
    let mut relaxed_plan = RelaxedPlan { path_s, cuts: vec![0], replicas: Vec::new(), is_open: false };
    let mut id = complete;
    while id != ROOT {
        let label = &labels[id as usize];
        let parent = &labels[label.parent as usize];
        let &PlacementMove { fewest, replicas, .. } = &space.moves(parent.situation)[label.move_index as usize];
        relaxed_plan.cuts.push(parent.cut);
        relaxed_plan.replicas.push(fewest);
        relaxed_plan.is_open |= space.is_joined((fewest, replicas));
        id = label.parent;
    }
    relaxed_plan
}

/// A pass over one space.
struct Pass<'p, 'a, S> {
    task: &'p Subproblem<'a>,
    space: &'p mut S,
    threshold_s: f64,
    /// Cached results of [`Pass::receive_s_per_byte`], by range of replicas and devices that stay free on the node.
    receive_rates: FxHashMap<(Span, Option<u32>), f64>,
}

impl<S: Placements> Pass<'_, '_, S> {
    /// Extends labels from the last cut to the first. Returns the result, whose plans are still missing, and the
    /// labels.
    fn run(mut self, beam: usize, effort: WorkBudget, control: &Control) -> (PassResult, Labels) {
        let last = self.task.model.cuts() - 1;
        let (nothing, endless_s) = (Vec::new(), f64::INFINITY);
        let mut found =
            PassResult { plans: nothing, shortest_s: endless_s, bound_s: endless_s, labels: 0, work: 0, tables: 0 };
        let mut labels = Labels::new(last + 1, self.task.micro_batches);
        let tables = PrefixBounds::new(self.task, self.space.links(), self.threshold_s, effort.behind, control);
        // Building the tables was interrupted, so nothing is known: the bound is 0.
        let Some(prefixes) = tables else {
            return (PassResult { bound_s: 0.0, ..found }, labels);
        };
        (found.work, found.tables) = (prefixes.work, prefixes.work);
        let root_bound_s = prefixes.bound_s(
            &Paths::default(),
            last,
            prefixes.place(self.space.free_units(self.space.rest(0)), None, 0),
        );
        // If the bound of the empty suffix reaches the threshold, the tables alone prove that no plan is below it.
        if root_bound_s < self.threshold_s {
            let (cut, paths) = (last as u32, Paths::default());
            let bound_s = root_bound_s;
            let root = Label {
                paths,
                bound_s,
                cut,
                situation: 0,
                stages: 0,
                min_in_flight: 1,
                max_in_flight: 1,
                recompute: false,
                parent: ROOT,
                move_index: 0,
            };
            labels.add(root, self.space);
        }
        let task = self.task;
        // A stage has at least one layer, so labels are only added at smaller cuts, and the labels of a cut are
        // complete when its turn comes.
        for cut in (1..=last).rev() {
            let mut ending = StagesByEnd::new(task, cut);
            let mut waiting: Vec<u32> = std::mem::take(&mut labels.waiting[cut]).into_values().flatten().collect();
            // Sorting makes the beam keep the labels with the lowest bounds, and makes the pass reproducible.
            labels.sort(&mut waiting);
            for (index, id) in waiting.into_iter().enumerate() {
                // A relaxed pass needs its shortest plan only, and lowers its threshold to each plan that it completes.
                if !S::IS_REAL && labels.all[id as usize].bound_s >= self.threshold_s {
                    break;
                }
                let is_much =
                    labels.all.len() >= effort.labels_of_pass || found.work + labels.work >= effort.work_of_pass;
                if index >= beam || is_much || control.should_stop() {
                    // Labels are sorted, so the first one that is not extended has the lowest bound of all that are
                    // left over.
                    found.bound_s = found.bound_s.min(labels.all[id as usize].bound_s);
                    break;
                }
                found.work += self.expand(id, &mut labels, &prefixes, &mut ending, effort);
            }
        }
        labels.keep_best_plans();
        found.work += labels.work;
        found.labels = labels.all.len() as u64;
        found.shortest_s = labels.complete.first().map_or(f64::INFINITY, |&id| labels.all[id as usize].bound_s);
        (found, labels)
    }

    /// Returns the shortest transfer of a byte from any stage in front to the stage that a move places. 0 if transfers
    /// overlap with computation.
    fn receive_s_per_byte(&mut self, choice: &PlacementMove) -> f64 {
        if self.task.settings.overlap_p2p_comm {
            return 0.0;
        }
        let (span, free) = ((choice.fewest, choice.replicas), choice.free_on_node);
        let links = self.space.links();
        // Large clusters have many kinds of spread stages, and few distinct moves.
        *self.receive_rates.entry((span, free)).or_insert_with(|| links.to_stage(span, free).s_per_byte)
    }

    /// Extends a label by every possible stage in front. Returns the work in work units.
    fn expand(
        &mut self,
        id: u32,
        labels: &mut Labels,
        prefixes: &PrefixBounds,
        ending: &mut StagesByEnd<'_>,
        WorkBudget { in_flight_values: max_values, grid, .. }: WorkBudget,
    ) -> u64 {
        let threshold_s = self.threshold_s;
        let label = labels.all[id as usize].clone();
        let end = label.cut as usize;
        let stages = label.stages + 1;
        if stages > self.task.settings.max_stages {
            return 0;
        }
        let (min, max) = self.task.settings.max_in_flights(stages, self.task.micro_batches);
        // Numbers in flight never grow along the stages, so a stage in front has at least the number of the one behind.
        let fewest = min;
        let min = min.max(label.min_in_flight);
        let micro = f64::from(self.task.micro_batches);
        let is_by_stage = self.task.recompute == Recompute::ByStage;
        // On many devices, rounding makes labels equal that differ slightly. The bound stays valid, since paths only
        // get shorter.
        let grid_s = if self.task.cluster.devices() > passes::EXACT_DEVICES { prefixes.min_s() / grid } else { 0.0 };
        let cut_bytes = if label.stages == 0 { 0.0 } else { self.task.cut_bytes[end] };
        let received_s_per_byte = if label.stages == 0 {
            0.0
        } else {
            let behind = labels.all[label.parent as usize].situation;
            let choice = self.space.moves(behind)[label.move_index as usize].clone();
            self.receive_s_per_byte(&choice)
        };
        let mut work = 0;
        // The tests below are ordered by cost: first times that need no tables, then one table entry, then memory and
        // all-reduce of the stage, and last the extension of all paths.
        for (move_index, choice) in (0_u32..).zip(self.space.moves(label.situation).iter()) {
            let short = ending.short(choice, threshold_s, &mut work);
            if short.is_empty() {
                continue;
            }
            let Some(rest) = self.space.after(label.situation, choice) else { continue };
            let free = self.space.free(rest);
            let free_speed = self.space.free_speed(rest);
            let place = prefixes.place(self.space.free_units(rest), choice.free_on_node, stages);
            // In a chain, a longer stage leaves less work to the stages in front, so the test is monotone.
            let is_much = |stage: &Stage| prefixes.busy_s(stage.begin, free_speed) >= threshold_s;
            let first = if self.task.model.is_chain { short.partition_point(is_much) } else { 0 };
            let send_s = cut_bytes * choice.transfer.s_per_byte;
            let receive_s_per_byte = self.receive_s_per_byte(choice);
            // Passes of the stage behind contain only this much of the same transfer. What they lack is on the link.
            let is_exposed = !self.task.settings.overlap_p2p_comm;
            let link_s = if is_exposed { (send_s - cut_bytes * received_s_per_byte).max(0.0) } else { send_s };
            for (at, &Stage { begin, forward_s, backward_s, .. }) in short.iter().enumerate().skip(first) {
                work += work::TRY_STAGE;
                // Some layers remain, but no device for them.
                if begin > 0 && free == 0 {
                    continue;
                }
                let receive_s = if begin == 0 { 0.0 } else { self.task.cut_bytes[begin] * receive_s_per_byte };
                let exposed_s = self.task.settings.exposed_transfer_s(receive_s, send_s);
                let stage_s = forward_s + backward_s + 2.0 * exposed_s;
                let busy_s = prefixes.busy_s(begin, free_speed);
                if busy_s >= threshold_s {
                    continue;
                }
                // The suffix is drained, or all but one micro-batch pass this stage. Then one more passes it, and the
                // stages in front add a round trip.
                let ahead_s = prefixes.round_trip_s(begin, place);
                if label.paths.drained_s.max((micro - 1.0) * stage_s) + stage_s + ahead_s >= threshold_s {
                    continue;
                }
                let (grad_reduce_s, of_zero_stages) = ending.sync_and_fitting(choice, at, &mut work);
                let lowest = lowest_that_fits(of_zero_stages, fewest, S::IS_REAL);
                let Some((fitting, messages)) = lowest else { continue };
                // The schedule may allow fewer in flight than a stage behind already has. Then only that number is
                // possible.
                let ranges = fitting.choices(min, max.max(min)).flat_map(|(recompute, (min, largest))| {
                    max_in_flights_to_try(min, largest, max_values).map(move |range| (recompute, range))
                });
                for (recompute, (min_in_flight, max_in_flight)) in ranges {
                    let backward_s = if recompute && is_by_stage { backward_s + forward_s } else { backward_s };
                    work += work::EXTEND_PATHS;
                    let (forward_comm_s, backward_comm_s) = messages.exposed_s(forward_s, backward_s, recompute);
                    let stage = PathStage {
                        forward_s: forward_s + forward_comm_s + exposed_s,
                        backward_s: backward_s + backward_comm_s + exposed_s,
                        grad_reduce_s,
                        min_in_flight,
                        max_in_flight,
                        busy_s: link_s,
                        latency_s: choice.transfer.latency_s,
                    };
                    let paths = label.paths.extend(&stage, label.min_in_flight, self.task.micro_batches);
                    let bound = |paths: &Paths| prefixes.bound_s(paths, begin, place).max(busy_s);
                    let bound_s = bound(&paths);
                    if bound_s < threshold_s {
                        // Rounding takes as long as all other steps together, so only labels that stay are rounded. The
                        // rounded bound also holds for the labels that the rounded one dominates.
                        let rounded = (grid_s > 0.0).then(|| paths.rounded_down(grid_s));
                        let (paths, bound_s) = rounded.map_or((paths, bound_s), |paths| (paths, bound(&paths)));
                        if begin == 0 && !S::IS_REAL {
                            self.threshold_s = self.threshold_s.min(bound_s);
                        }
                        let label = Label {
                            paths,
                            bound_s,
                            cut: begin as u32,
                            situation: self.space.situation(rest),
                            stages,
                            min_in_flight,
                            max_in_flight,
                            recompute,
                            parent: id,
                            move_index,
                        };
                        labels.add(label, self.space);
                    }
                }
            }
        }
        work
    }
}

/// Returns the ranges of micro-batches in flight that a pass distinguishes, from `min` to `largest`.
///
/// Each number is a range of its own, the largest first. If there are more than `max_values`, all numbers between the
/// largest ones and `min` form one range. The paths of a range are lower bounds for each number in it
/// (docs/proofs.md, *Windows left open*).
fn max_in_flights_to_try(min: u32, largest: u32, max_values: u32) -> impl Iterator<Item = (u32, u32)> {
    let few = if largest - min < max_values { min } else { largest + 3 - max_values };
    let each = (few..=largest).rev().map(|max_in_flight| (max_in_flight, max_in_flight));
    let others = (few > min).then(|| [(min + 1, few - 1), (min, min)]);
    each.chain(others.into_iter().flatten())
}
