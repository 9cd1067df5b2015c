//! Tests of each lemma of docs/proofs.md against simulated pipelines and plans. A failure names the length that is too
//! long.

use crate::planner::effort::tables::{self, Resolution};
use crate::planner::hybrid::{
    bounds::{
        bound_bisection::min_step_of_ranges_s,
        device_classes::Units,
        nested_stages::sums_s,
        paths::{Middle, PathStage, Paths},
        prefix::{INCREMENTS, PrefixBounds, PrefixIncrements, min_step_s},
    },
    evaluate::{
        candidate_plan::{CandidatePlan, StageCandidate},
        pipeline_simulator::PipelineSimulator,
        plan_cost::PlanEvaluator,
        stage_cost::path_stage,
    },
    exhaustive::exhaustive,
    settings::{Recompute, Settings},
    subproblem::Subproblem,
};
use proptest::prelude::*;

use crate::control::Control;
use crate::cost::network::Cluster;
use crate::cost::{self, LayerSums, Pace};
use crate::model::states::{CutPoints, DEFAULT_BOUND};
use crate::planner::random_problems::{
    RandomProblem, branching, far_apart, few_layers_on_many_devices, measured_at_several_sizes, problems,
};
use crate::schedule::{Kind, one_f_one_b};
use crate::simulate::{Costs, Links, StageTimes, Sweep, Transfer};

/// Tolerance for sums of the same times in different order.
const ROUNDING: f64 = 1e-9;

/// A pipeline of stages, the first one first, and the number of its micro-batches.
#[derive(Debug, Clone)]
struct Pipeline {
    stages: Vec<PathStage>,
    micro_batches: u32,
}

fn pipelines() -> impl Strategy<Value = Pipeline> {
    (stages(1..7), 1_u32..14).prop_map(|(stages, micro_batches)| Pipeline::of(stages, micro_batches))
}

/// Returns stages whose `max_in_flight` is what each adds to the number in flight of the stage behind it.
fn stages(count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<PathStage>> {
    // Sums of 64ths are exact, so the tests need little tolerance. Zero and one are frequent, so that many times are
    // equal.
    let some_s = |min: u32, max: u32| (64 * min..64 * max).prop_map(|parts: u32| f64::from(parts) / 64.0);
    let time_s = || prop_oneof![2 => Just(0.0), 3 => Just(1.0), 3 => some_s(0, 3), 1 => some_s(3, 30)];
    let stage = (time_s(), time_s(), time_s(), time_s(), time_s(), 0_u32..4).prop_map(
        |(forward_s, backward_s, grad_reduce_s, busy_s, latency_s, max_in_flight)| PathStage {
            forward_s,
            backward_s,
            grad_reduce_s,
            min_in_flight: max_in_flight,
            max_in_flight,
            busy_s,
            latency_s,
        },
    );
    prop::collection::vec(stage, count)
}

/// Returns numbers with about four bits set.
fn rare_bits() -> impl Strategy<Value = u32> {
    (any::<u32>(), any::<u32>(), any::<u32>()).prop_map(|(one, two, three)| one & two & three)
}

/// Times of the events of one stage between which lengths are measured, in seconds.
#[derive(Debug, Clone, Copy)]
struct Events {
    /// Start of the first forward.
    first_forward_s: f64,
    /// Start of the last forward.
    last_forward_s: f64,
    /// End of the first backward.
    first_back_s: f64,
    /// End of the last backward.
    last_back_s: f64,
    /// Shortest time from the start of a forward to the end of the backward of the same micro-batch.
    trip_s: f64,
    /// End of everything on this stage and the stages behind it, gradient reduction included.
    end_s: f64,
}

impl Pipeline {
    /// Returns a pipeline whose numbers in flight never grow along the stages, with no link behind the last one.
    fn of(mut stages: Vec<PathStage>, micro_batches: u32) -> Self {
        let mut max_in_flight = 0;
        for stage in stages.iter_mut().rev() {
            max_in_flight = (max_in_flight + stage.max_in_flight).clamp(1, micro_batches);
            (stage.min_in_flight, stage.max_in_flight) = (max_in_flight, max_in_flight);
        }
        if let Some(last) = stages.last_mut() {
            (last.busy_s, last.latency_s) = (0.0, 0.0);
        }
        Self { stages, micro_batches }
    }

    /// Simulates the pipeline and returns the events of each stage.
    fn simulate(&self) -> Vec<Events> {
        let max_in_flights: Vec<u32> = self.stages.iter().map(|stage| stage.max_in_flight).collect();
        let schedule = one_f_one_b(&max_in_flights, self.micro_batches);
        let message = |stage: &PathStage| Transfer { busy_s: stage.busy_s, latency_s: stage.latency_s };
        let costs = Costs {
            compute: self.stages.iter().map(|stage| StageTimes::new(stage.forward_s, stage.backward_s)).collect(),
            activation: self.stages.iter().map(message).collect(),
            gradient: self.stages.iter().map(message).collect(),
            gradient_sync_s: self.stages.iter().map(|stage| stage.grad_reduce_s).collect(),
            optimizer_s: vec![0.0; self.stages.len()],
        };
        let times = Sweep::default().times(&schedule, &costs, Links::Queued).expect("limits in flight never grow");
        let count = self.micro_batches as usize;
        let mut events: Vec<Events> = Vec::new();
        let mut end_s: f64 = 0.0;
        for (rank, stage) in self.stages.iter().enumerate().rev() {
            let (mut forward_s, mut back_s) = (vec![0.0; count], vec![0.0; count]);
            for (action, at) in schedule.action_lists[rank].iter().zip(times.offsets[rank]..) {
                match action.kind {
                    Kind::Forward => forward_s[action.micro_batch as usize] = times.start_s[at],
                    _ => back_s[action.micro_batch as usize] = times.end_s[at],
                }
            }
            end_s = end_s.max(back_s[count - 1] + stage.grad_reduce_s);
            events.push(Events {
                first_forward_s: forward_s[0],
                last_forward_s: forward_s[count - 1],
                first_back_s: back_s[0],
                last_back_s: back_s[count - 1],
                trip_s: forward_s.iter().zip(&back_s).map(|(start, end)| end - start).fold(f64::INFINITY, f64::min),
                end_s,
            });
        }
        events.reverse();
        events
    }

    /// Returns the paths of the suffix that begins with each stage, and at the end the paths of the empty suffix.
    ///
    /// The paths know each number in flight only as a range, from `open.0` below the real one to `open.1` above it.
    fn suffixes(&self, open: (u32, u32)) -> Vec<Paths> {
        let mut suffixes = vec![Paths::default()];
        let mut next_max_in_flight = 1;
        for stage in self.stages.iter().rev() {
            let min_in_flight = stage.max_in_flight.saturating_sub(open.0).max(1);
            let max_in_flight = (stage.max_in_flight + open.1).min(self.micro_batches);
            let stage = PathStage { min_in_flight, max_in_flight, ..*stage };
            suffixes.push(suffixes[suffixes.len() - 1].extend(&stage, next_max_in_flight, self.micro_batches));
            next_max_in_flight = min_in_flight;
        }
        suffixes.reverse();
        suffixes
    }
}

fn at_most(length_s: f64, took_s: f64) -> bool {
    length_s <= took_s + ROUNDING * (1.0 + took_s.abs())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_length_of_a_suffix_is_longer_than_it_takes(pipeline in pipelines(), open in (0_u32..4, 0_u32..4)) {
        let events = pipeline.simulate();
        for (stage, (paths, at)) in pipeline.suffixes(open).iter().zip(&events).enumerate() {
            let lemmas = [
                ("trip", paths.trip_s, at.trip_s),
                ("first_back", paths.first_back_s, at.first_back_s - at.first_forward_s),
                ("last_back", paths.last_back_s, at.last_back_s - at.last_forward_s),
                ("last_synced", paths.last_synced_s, at.end_s - at.last_forward_s),
                ("last_start", paths.last_start_s, at.last_forward_s - at.first_forward_s),
                ("busy", paths.busy_s, at.last_back_s - at.first_forward_s),
                ("drained", paths.drained_s, at.last_back_s - at.first_forward_s),
                ("synced", paths.synced_s, at.end_s - at.first_forward_s),
                ("middle", paths.middle.path_s(), at.last_back_s - at.first_forward_s),
            ];
            for (lemma, length_s, took_s) in lemmas {
                prop_assert!(at_most(length_s, took_s), "{lemma} of stage {stage}: {length_s} s, took {took_s} s");
            }
        }
    }

    #[test]
    fn the_clock_of_a_pipeline_says_what_its_simulation_says(pipeline in pipelines()) {
        let step_s = PipelineSimulator::default().step_s(pipeline.stages.iter().copied(), pipeline.micro_batches);
        prop_assert_eq!(step_s, Some(pipeline.simulate()[0].end_s));
    }

    #[test]
    fn no_sum_of_a_suffix_and_the_stages_in_front_is_longer_than_the_step(pipeline in pipelines()) {
        let step_s = pipeline.simulate()[0].end_s;
        let suffixes = pipeline.suffixes((0, 0));
        let mut min = PrefixIncrements::EMPTY_PREFIX;
        for (split, paths) in suffixes.iter().enumerate() {
            for (lemma, sum_s) in INCREMENTS.iter().zip(min.step_bounds_s(paths)) {
                prop_assert!(at_most(sum_s, step_s), "{lemma} of split {split}: {sum_s} s, the step takes {step_s} s");
            }
            if let Some(stage) = pipeline.stages.get(split) {
                min = min.behind(stage, pipeline.micro_batches);
            }
        }
    }

    #[test]
    fn a_suffix_that_dominates_stays_below_the_step_of_the_other(
        front in stages(1..4), one in stages(1..5), two in stages(1..5), changes in rare_bits(), count in 1_u32..14
    ) {
        // Two random suffixes hardly ever dominate each other, so the second one is the first with a few times changed.
        let changed = |((index, one), two): ((usize, &PathStage), &PathStage)| {
            let pick = |field: usize, one: f64, two: f64| if changes >> (5 * index + field) & 1 == 1 { two } else { one };
            PathStage {
                forward_s: pick(0, one.forward_s, two.forward_s),
                backward_s: pick(1, one.backward_s, two.backward_s),
                grad_reduce_s: pick(2, one.grad_reduce_s, two.grad_reduce_s),
                busy_s: pick(3, one.busy_s, two.busy_s),
                latency_s: pick(4, one.latency_s, two.latency_s),
                min_in_flight: one.max_in_flight,
                max_in_flight: one.max_in_flight,
            }
        };
        let two = one.iter().enumerate().zip(two.iter().cycle()).map(changed).collect();
        let (mut one, mut two) = (Pipeline::of(one, count), Pipeline::of(two, count));
        // Labels compete only if the numbers in flight of their first stages agree.
        let max_in_flight = one.stages[0].max_in_flight.max(two.stages[0].max_in_flight);
        for first in [&mut one.stages[0], &mut two.stages[0]] {
            (first.min_in_flight, first.max_in_flight) = (max_in_flight, max_in_flight);
        }
        let behind_front = |suffix: &Pipeline| {
            let last = &suffix.stages[0];
            let max_in_flight = |stage: &PathStage| (last.max_in_flight + stage.max_in_flight).min(count);
            let mut stages: Vec<PathStage> =
                front.iter().map(|stage| {
                    let in_flight = max_in_flight(stage);
                    PathStage { min_in_flight: in_flight, max_in_flight: in_flight, ..*stage }
                }).collect();
            stages.sort_by_key(|stage| std::cmp::Reverse(stage.max_in_flight));
            stages
        };
        for (better, worse) in [(&one, &two), (&two, &one)] {
            let mut paths = better.suffixes((0, 0))[0];
            if !paths.dominates(&worse.suffixes((0, 0))[0], count) {
                continue;
            }
            // Which of two middles is kept is a guess, so the lemma does not hold for that field of the paths. Compare
            // paths without the middle, and the final bound with it.
            let bare = |paths: Paths| Paths { middle: Middle::default(), ..paths };
            let (mut bare_paths, mut bare_others) = (bare(paths), bare(worse.suffixes((0, 0))[0]));
            let mut stages = behind_front(worse);
            let mut next_max_in_flight = better.stages[0].max_in_flight;
            for stage in stages.iter().rev() {
                paths = paths.extend(stage, next_max_in_flight, count);
                bare_paths = bare(bare_paths.extend(stage, next_max_in_flight, count));
                bare_others = bare(bare_others.extend(stage, next_max_in_flight, count));
                next_max_in_flight = stage.max_in_flight;
                prop_assert!(bare_paths.dominates(&bare_others, count), "{bare_paths:?} and {bare_others:?}");
            }
            stages.extend(&worse.stages);
            let step_s = Pipeline { stages, micro_batches: count }.simulate()[0].end_s;
            prop_assert!(at_most(paths.synced_s, step_s), "{} s, but the step takes {step_s} s", paths.synced_s);
        }
    }

    #[test]
    fn no_table_of_stages_in_front_is_above_a_plan(
        mut problem in problems(), groups in 1_usize..8, overlap_p2p_comm in any::<bool>()
    ) {
        problem.settings.overlap_p2p_comm = overlap_p2p_comm;
        in_front_is_not_above(&problem, groups)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_table_is_above_a_plan_with_stages_inside_a_group_that_wait_for_each_other(
        problem in far_apart(), groups in 1_usize..3
    ) {
        in_front_is_not_above(&problem, groups)?;
    }
}

/// Checks that no sum of a suffix of the problem's plan and the tables of the stages in front is longer than its step.
fn in_front_is_not_above(problem: &RandomProblem, groups: usize) -> Result<(), TestCaseError> {
    let RandomProblem { graph, cluster, settings, replicas } = problem;
    let model = LayerSums::new(graph, &CutPoints::of(graph, DEFAULT_BOUND).expect("a chain"));
    let tasks = Subproblem::all(&model, cluster, settings);
    let mut evaluator = PlanEvaluator::new(&model, cluster, settings);
    for task in &tasks {
        let Some(plan) = plan_of(task, &mut evaluator, replicas) else { continue };
        let step_s = evaluator.evaluate(&plan).expect("limits in flight never grow").step_s;
        let stages = evaluator.stages(&plan).expect("it was evaluated");
        let links = crate::planner::hybrid::bounds::link_bounds::Links::new(task, false);
        let detail = Resolution { max_cut_groups: groups, ..tables::BISECTION_RESOLUTION };
        let front = PrefixBounds::with(task, &links, f64::INFINITY, usize::MAX, detail, &Control::default());
        let front = front.expect("the search is never stopped");
        let units = Units::new(task.cluster);
        let (mut paths, mut next_max_in_flight, mut free) = (Paths::default(), 1, units.all(cluster));
        for (behind, (choice, cost)) in (0_u32..).zip(plan.stages.iter().zip(&stages).rev()) {
            let free_devices = plan
                .stages
                .iter()
                .rev()
                .nth(behind.wrapping_sub(1) as usize)
                .and_then(|last| free_devices_beside(cluster, &plan, last));
            let bound_s = front.bound_s(&paths, choice.end, front.place(free, free_devices, behind));
            prop_assert!(at_most(bound_s, step_s), "{bound_s} s with {behind} stages behind, {step_s} s in {plan:?}");
            paths = paths.extend(
                &path_stage(cost, (choice.max_in_flight, choice.max_in_flight)),
                next_max_in_flight,
                task.micro_batches,
            );
            let each = |at: u32| units.of(cluster.nodes[at as usize].speed);
            let taken = choice.footprint.iter().map(|&(at, count)| count * each(at));
            (next_max_in_flight, free) = (choice.max_in_flight, free - taken.sum::<u32>());
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_tables_are_above_the_best_of_all_plans(
        problem in branching(),
        groups in 1_usize..5,
        above in prop_oneof![Just(1.0 + 1e-6), 1.0..1.6, Just(f64::INFINITY)],
        overlap_p2p_comm in any::<bool>(),
    ) {
        let RandomProblem { graph, cluster, settings, .. } = problem;
        let settings = Settings { overlap_p2p_comm, ..settings };
        let model = LayerSums::new(&graph, &CutPoints::of(&graph, DEFAULT_BOUND).expect("no cycle"));
        let control = Control::default();
        let Ok((plan, best, _)) = exhaustive(&model, &cluster, &settings, &control) else { return Ok(()) };
        let detail = Resolution { max_cut_groups: groups, ..tables::BISECTION_RESOLUTION };
        for task in Subproblem::all(&model, &cluster, &settings) {
            let is_its_own = plan.micro_batch == task.micro_batch;
            let links = crate::planner::hybrid::bounds::link_bounds::Links::new(&task, false);
            let threshold_s = above * best.step_s;
            let front = PrefixBounds::with(&task, &links, threshold_s, usize::MAX, detail, &control)
                .expect("the search is never stopped");
            let bound_s = front.whole_s();
            prop_assert!(!is_its_own || at_most(bound_s, best.step_s), "{bound_s} s, {} s by {plan:?}", best.step_s);
        }
    }

    #[test]
    fn no_bound_of_joined_replica_counts_is_above_the_best_of_all_plans(
        problem in measured_at_several_sizes(),
        max_ranges in 1_usize..4,
        max_work in prop_oneof![Just(1.0), Just(1e3), Just(1e5)],
        above in prop_oneof![Just(1.0 + 1e-6), Just(1.3)],
    ) {
        let RandomProblem { graph, cluster, settings, .. } = problem;
        let model = LayerSums::new(&graph, &CutPoints::of(&graph, DEFAULT_BOUND).expect("a chain"));
        let control = Control::default();
        for &micro_batch in &settings.pipeline_micro_batch_sizes {
            let settings = Settings { pipeline_micro_batch_sizes: vec![micro_batch], ..settings.clone() };
            let Ok((plan, best, _)) = exhaustive(&model, &cluster, &settings, &control) else { continue };
            let below_s = above * best.step_s;
            let bound_s = min_step_of_ranges_s(&model, &cluster, &settings, (below_s, max_ranges), &control);
            prop_assert!(at_most(bound_s, best.step_s), "{bound_s} s, {} s by {plan:?}", best.step_s);
            // A low limit on the work of tables joins replica counts that give very different samples.
            let detail = Resolution { max_work, ..tables::BISECTION_RESOLUTION };
            for task in Subproblem::all(&model, &cluster, &settings) {
                let links = crate::planner::hybrid::bounds::link_bounds::Links::new(&task, false);
                let front = PrefixBounds::with(&task, &links, below_s, usize::MAX, detail, &control)
                    .expect("the search is never stopped");
                let bound_s = front.whole_s();
                prop_assert!(at_most(bound_s, best.step_s), "{bound_s} s, {} s by {plan:?}", best.step_s);
            }
        }
    }

    #[test]
    fn no_share_of_the_work_among_devices_of_use_is_above_the_best_of_all_plans(
        problem in few_layers_on_many_devices(), above in prop_oneof![Just(1.0 + 1e-6), 1.0..1.6, Just(f64::INFINITY)]
    ) {
        let RandomProblem { graph, cluster, settings, .. } = problem;
        let model = LayerSums::new(&graph, &CutPoints::of(&graph, DEFAULT_BOUND).expect("a chain"));
        let control = Control::default();
        for &micro_batch in &settings.pipeline_micro_batch_sizes {
            let settings = Settings { pipeline_micro_batch_sizes: vec![micro_batch], ..settings.clone() };
            let Ok((plan, best, _)) = exhaustive(&model, &cluster, &settings, &control) else { continue };
            for task in Subproblem::all(&model, &cluster, &settings) {
                let links = crate::planner::hybrid::bounds::link_bounds::Links::new(&task, false);
                let (bound_s, _) = min_step_s(&task, &links, above * best.step_s, &control);
                prop_assert!(at_most(bound_s, best.step_s), "{bound_s} s, {} s by {plan:?}", best.step_s);
            }
        }
    }

    #[test]
    fn a_smaller_stage_and_what_runs_behind_it_leave_as_much_to_sum(problem in branching(), overlap in any::<bool>()) {
        let model = LayerSums::new(&problem.graph, &CutPoints::of(&problem.graph, DEFAULT_BOUND).expect("no cycle"));
        if model.is_chain {
            return Ok(());
        }
        let (totals, rate) = (model.totals(1), problem.cluster.all_reduce(2, 1));
        for end in 1..model.cuts() {
            let step_bounds_s = sums_s(&model, &totals, rate, overlap, end);
            for (begin, sum_s) in model.begins(end).zip(step_bounds_s) {
                let whole_s = cost::grad_reduce_s(&model, &totals, Pace::at_speed(1.0), (begin as usize, end), rate, overlap);
                prop_assert!((sum_s - whole_s).abs() <= ROUNDING * (1.0 + whole_s), "{sum_s} s for {whole_s} s");
            }
        }
    }
}

/// Returns the devices that a stage and the stages behind it leave free on its node. Returns `None` if it is on
/// several.
fn free_devices_beside(cluster: &Cluster, plan: &CandidatePlan, stage: &StageCandidate) -> Option<u32> {
    let &[(node, _)] = stage.footprint.as_slice() else { return None };
    let behind = plan.stages.iter().filter(|other| other.begin >= stage.begin);
    let used: u32 =
        behind.flat_map(|other| &other.footprint).filter(|taken| taken.0 == node).map(|taken| taken.1).sum();
    Some(cluster.nodes[node as usize].devices - used)
}

/// Returns the plan that cuts the chain into equal stages on consecutive devices, with the largest numbers in flight
/// that memory allows. Returns `None` if the devices are too few or too small.
fn plan_of(task: &Subproblem<'_>, evaluator: &mut PlanEvaluator<'_>, replicas: &[u32]) -> Option<CandidatePlan> {
    let cuts = task.model.cuts() - 1;
    let count = replicas.len().min(cuts);
    let mut rest = (0_u32..).zip(&task.cluster.nodes).flat_map(|(node, m)| (0..m.devices).map(move |_| node));
    let mut stages = Vec::new();
    for (index, &wanted) in replicas[..count].iter().enumerate() {
        let mut footprint: Vec<(u32, u32)> = Vec::new();
        for _ in 0..wanted {
            let node = rest.next()?;
            match footprint.last_mut() {
                Some((last, devices)) if *last == node => *devices += 1,
                _ => footprint.push((node, 1)),
            }
        }
        let (begin, end) = (cuts * index / count, cuts * (index + 1) / count);
        stages.push(StageCandidate {
            begin,
            end,
            footprint,
            max_in_flight: 1,
            recompute: task.recompute == Recompute::Always,
        });
    }
    let mut plan = CandidatePlan { micro_batch: task.micro_batch, stages };
    let costs = evaluator.settled(&mut plan).ok()?;
    let max_in_flights = evaluator.max_in_flights_of(&costs, plan.micro_batch, true)?;
    Some(plan.with_max_in_flights(&max_in_flights))
}
