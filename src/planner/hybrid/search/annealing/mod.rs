//! Simulated annealing of the longest path: plans change by small random steps, at first also for the worse
//! (Kirkpatrick, Gelatt and Vecchi, 1983).
//!
//! Many chains of changes run side by side. After each round the better half continues, for twice as long and at a
//! lower temperature. The best plans are simulated, since a path may be slightly shorter than the step. A plan may lack
//! memory for a while, at a penalty, and the best plan that fits is stored separately. Work is counted in changes, and
//! random numbers depend on the number of the chain only, so the result is the same on every machine and for any number
//! of threads.

use crate::planner::effort::{annealing, work};
use crate::planner::hybrid::{
    evaluate::plan_cost::PlanEvaluator,
    search::unscheduled_plan::{PlanScorer, UnscheduledPlan},
    subproblem::Subproblem,
};
mod changes;
mod random;

use random::Random;
use rayon::prelude::*;

use crate::control::Control;
use crate::cost::LayerSums;
use crate::cost::network::Cluster;

/// One chain of changes.
struct AnnealingChain {
    number: u64,
    now: UnscheduledPlan,
    /// Best plan that fits, with its longest path. Once plans are simulated, with its step.
    best: Option<(f64, UnscheduledPlan)>,
}

impl AnnealingChain {
    fn best_s(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |(length_s, _)| *length_s)
    }

    /// Stores a plan that fits if it is the best one of the chain.
    fn found(&mut self, length_s: f64, plan: &UnscheduledPlan) {
        match &mut self.best {
            Some((best_s, _)) if *best_s <= length_s => {}
            Some((best_s, best)) => {
                *best_s = length_s;
                best.copy_from(plan);
            }
            None => self.best = Some((length_s, plan.clone())),
        }
    }
}

/// Kind of a walk, which is one run of all its chains from the first to the last round.
#[derive(Clone, Copy)]
pub(crate) struct Walk {
    /// Temperature at the start of the first round, relative to the step.
    pub first_temperature: f64,
    /// Whether all chains start at the best plan. Then some changes move layers with devices, or drop a stage.
    pub is_around_best: bool,
}

impl Walk {
    /// Walk from many plans.
    pub(crate) const WIDE: Self = Self { first_temperature: annealing::FIRST_TEMPERATURE, is_around_best: false };
}

/// Settings of one annealing round.
#[derive(Clone, Copy)]
struct AnnealingRound {
    /// Number of the round, from 0.
    number: u64,
    /// Seed, equal for all rounds.
    seed: u64,
    /// Work of each chain, in work units.
    effort: u64,
    /// Temperature at the start of the round, relative to the step.
    temperature: f64,
    is_simulated: bool,
    /// As in [`Walk`].
    is_around_best: bool,
}

/// Scores the plans of one chain and counts the work.
struct ChainScorer<'j, 'a> {
    scorer: &'j mut PlanScorer<'a>,
    evaluator: PlanEvaluator<'a>,
    round: AnnealingRound,
    left: u64,
}

impl ChainScorer<'_, '_> {
    /// Returns the length of a plan, with a penalty for missing memory, and whether the plan fits. Lengths of `limit_s`
    /// and more are not distinguished.
    fn penalized_length(&mut self, plan: &mut UnscheduledPlan, limit_s: f64) -> (f64, bool) {
        self.left = self.left.saturating_sub(step_cost(plan));
        let score = self.scorer.score(plan, limit_s);
        let fits = score.overflow == 0.0;
        let length_s = score.path_s * (1.0 + annealing::SHORTFALL_PENALTY * score.overflow);
        let task = self.scorer.tasks[plan.task];
        // Each micro-batch has a forward and a backward action in each stage.
        let actions = 2 * u64::from(task.micro_batches) * plan.stages() as u64;
        // Simulation takes much longer than computing paths. So only the last few chains simulate, and only plans that
        // would be accepted by their path.
        if !self.round.is_simulated || !fits || length_s >= limit_s || actions > annealing::MAX_SIMULATED_ACTIONS {
            return (length_s, fits);
        }
        self.left = self.left.saturating_sub(work::ACTION * actions + work::PREPARE_NODE * plan.parts());
        // The fast simulation does not know the extra all-reduces of tied weights.
        let step_s =
            if self.evaluator.shares_weights() { self.evaluated_step_s(plan, task) } else { self.scorer.step_s(plan) };
        // The penalized path is a lower bound, so the larger value is the better estimate.
        (step_s.unwrap_or(f64::INFINITY).max(length_s), true)
    }

    /// Returns the step of a plan as the evaluator simulates it, or `None` if it does not fit.
    fn evaluated_step_s(&mut self, plan: &UnscheduledPlan, task: &Subproblem<'_>) -> Option<f64> {
        let plan = plan.candidate(task);
        let stages = self.evaluator.stages(&plan).ok()?;
        let max_in_flights = [true, false]
            .into_iter()
            .find_map(|eager| self.evaluator.max_in_flights_of(&stages, plan.micro_batch, eager))?;
        self.evaluator.step_s(&stages, &max_in_flights, plan.micro_batch).ok()
    }
}

/// The space of plans that annealing changes.
pub(crate) struct Annealer<'a> {
    tasks: &'a [&'a Subproblem<'a>],
    model: &'a LayerSums,
    cluster: &'a Cluster,
    /// A line of nested cuts, along which runs of cuts move.
    line: &'a [u32],
    /// Position of each cut in `line`, or `None` if it is not in it.
    place: Vec<Option<usize>>,
}

impl<'a> Annealer<'a> {
    pub(crate) fn new(tasks: &'a [&'a Subproblem<'a>], line: &'a [u32]) -> Option<Self> {
        let &&Subproblem { model, cluster, .. } = tasks.first()?;
        let mut place = vec![None; model.cuts()];
        for (at, &cut) in line.iter().enumerate() {
            place[cut as usize] = Some(at);
        }
        Some(Self { tasks, model, cluster, line, place })
    }

    /// Moves runs of cuts of each plan by one or two positions while that shortens its longest path. Returns the work.
    pub(crate) fn settle(&self, plans: &mut [UnscheduledPlan], control: &Control) -> u64 {
        let settled = plans.par_iter_mut().map_init(
            || PlanScorer::new(self.tasks, self.cluster, annealing::KEPT_SYNCS),
            |scorer, plan| if control.should_stop() { 0 } else { self.settle_one(plan, scorer) },
        );
        settled.sum()
    }

    /// Settles the cuts of one plan. A plan that does not fit is left as it is.
    fn settle_one(&self, plan: &mut UnscheduledPlan, scorer: &mut PlanScorer<'a>) -> u64 {
        let score = scorer.score(plan, f64::INFINITY);
        if score.overflow > 0.0 {
            return 0;
        }
        let (mut path_s, mut tried) = (score.path_s, 1);
        let mut next = plan.clone();
        loop {
            let before_s = path_s;
            for first in 1..plan.stages() {
                // A bottleneck often is a run of equal stages. Moving one cut of it helps only if the others follow.
                for last in first..plan.stages().min(first + annealing::MAX_RUN) {
                    for (distance, is_ahead) in [(1, true), (1, false), (2, true), (2, false)] {
                        while self.shift_run(&mut next, (first, last), distance, is_ahead) {
                            tried += 1;
                            let score = scorer.score(&mut next, path_s);
                            if score.overflow > 0.0 || score.path_s >= path_s {
                                break;
                            }
                            path_s = score.path_s;
                            plan.copy_cuts_from(&next);
                        }
                        // The last shift did not help, so undo it.
                        next.copy_cuts_from(plan);
                    }
                }
            }
            // Continue until a whole turn gains almost nothing.
            if path_s >= before_s * (1.0 - annealing::SETTLED) {
                return tried * (work::ANNEAL_PLAN + work::ANNEAL_STAGE * plan.stages() as u64);
            }
        }
    }

    /// Anneals `plans` in one walk, with `effort` work units for all rounds and chains together.
    ///
    /// After each round `on_round` receives the best plans that fit, shortest first, and returns whether to continue.
    pub(crate) fn anneal(
        &self,
        plans: Vec<UnscheduledPlan>,
        (effort, seed, walk): (u64, u64, Walk),
        control: &Control,
        mut on_round: impl FnMut(&[&UnscheduledPlan]) -> bool,
    ) {
        // Few chains that make progress are better than many that do not.
        let steps = plans.first().map_or(1, |plan| effort / step_cost(plan));
        let max = ((steps / annealing::CHANGES_PER_CHAIN) as usize).clamp(annealing::MIN_CHAINS, annealing::MAX_CHAINS);
        let mut chains: Vec<AnnealingChain> = (0..)
            .zip(plans.into_iter().take(max))
            .map(|(number, now)| AnnealingChain { number, now, best: None })
            .collect();
        // Each round halves the chains, and the effort of a round is the same for all rounds.
        let rounds = u64::from(chains.len().max(1).ilog2()) + 1;
        let mut temperature = walk.first_temperature;
        for number in 0..rounds {
            let is_simulated = chains.len() <= annealing::SIMULATING_CHAINS;
            let effort = effort / rounds / chains.len().max(1) as u64;
            let is_around_best = walk.is_around_best;
            let round = AnnealingRound { number, seed, effort, temperature, is_simulated, is_around_best };
            (chains.par_iter_mut()).for_each_init(
                || PlanScorer::new(self.tasks, self.cluster, annealing::KEPT_SYNCS),
                |scorer, chain| self.run_round(chain, scorer, round, control),
            );
            chains.sort_by(|a, b| a.best_s().total_cmp(&b.best_s()).then(a.number.cmp(&b.number)));
            // Chains that found the same plan would repeat each other's search.
            chains.dedup_by(|b, a| a.best.is_some() && a.best == b.best);
            let leaders: Vec<&UnscheduledPlan> =
                chains.iter().filter_map(|chain| chain.best.as_ref().map(|(_, best)| best)).collect();
            if !on_round(&leaders) || control.should_stop() {
                return;
            }
            chains.truncate(chains.len().div_ceil(2));
            temperature *= annealing::ROUND_COOLING;
        }
    }

    /// Runs one round of a chain, starting from its best plan.
    fn run_round(
        &self,
        chain: &mut AnnealingChain,
        scorer: &mut PlanScorer<'a>,
        round: AnnealingRound,
        control: &Control,
    ) {
        let settings = self.tasks[chain.now.task].settings;
        let mut chain_scorer = ChainScorer {
            scorer,
            evaluator: PlanEvaluator::new(self.model, self.cluster, settings),
            round,
            left: round.effort,
        };
        // The seed depends on round and chain, never on the thread, so results are reproducible.
        let mut random = Random(round.seed.wrapping_add(chain.number << 32 | round.number));
        if let Some((_, best)) = chain.best.take() {
            chain.now = best;
        }
        let (mut now_s, fits) = chain_scorer.penalized_length(&mut chain.now, f64::INFINITY);
        if fits {
            chain.best = Some((now_s, chain.now.clone()));
        }
        let mut next = chain.now.clone();
        let (mut watched, mut temperature) = (chain_scorer.left, round.temperature);
        while chain_scorer.left > 0 {
            // Checks of the clock are rare, because a change takes only microseconds. The temperature falls at the same
            // points.
            if chain_scorer.left + annealing::UNWATCHED_WORK <= watched {
                if control.should_stop() {
                    return;
                }
                watched = chain_scorer.left;
                temperature = round.temperature
                    * annealing::COOLING_IN_ROUND.powf(1.0 - chain_scorer.left as f64 / round.effort as f64);
            }
            let is_changed =
                // One change in four is followed by a second one, to leave plans that no single change improves.
                self.change_of(round, &mut next, &mut random)
                    && (random.below(4) > 0 || self.change_of(round, &mut next, &mut random));
            // Metropolis criterion, solved for the length: a plan longer by a share x is accepted with probability
            // e^(-x / temperature). Drawing the random number first gives a limit at which scoring can stop early.
            let limit_s = now_s * (1.0 - temperature * random.part().ln());
            let (next_s, fits) =
                if is_changed { chain_scorer.penalized_length(&mut next, limit_s) } else { (f64::INFINITY, false) };
            if next_s < limit_s {
                now_s = next_s;
                chain.now.copy_from(&next);
                if fits {
                    chain.found(next_s, &next);
                }
            } else {
                next.copy_from(&chain.now);
            }
        }
    }
}

/// Returns the work of changing and scoring a plan once, in work units.
fn step_cost(plan: &UnscheduledPlan) -> u64 {
    let (stages, nodes) = (plan.stages() as u64, plan.free.len() as u64);
    work::ANNEAL_PLAN
        + work::ANNEAL_STAGE * stages
        + work::ANNEAL_NODE * nodes
        + work::ANNEAL_STAGE_AND_NODE * stages * nodes
}
