//! Moves the limit, or the value of a plan, until the best plan found meets the proof that nothing is better.

use super::cost::{Costs, Step};
use super::dual_prices::{self, DualSolution};
use super::feasible_edges::FeasibleEdges;
use super::labels;
use super::problem::Objective;
use super::relaxed;
use crate::control::{Control, Progress};
use crate::planner::effort::chain as effort;
use crate::planner::effort::chain::SearchWidth;

/// Relative difference up to which bounds count as equal, since sums of times round.
const ROUNDING: f64 = 1e-9;

/// Hosts and bits are whole numbers, so a better plan is better by at least one.
const FEWER_BY_ONE: fn(f64) -> f64 = |value| value - 1.0 + ROUNDING;

/// Returns a limit that sums of times keep even if they round up.
pub(super) fn rounded_up(limit_s: f64) -> f64 {
    (limit_s * (1.0 + 1e-12)).min(f64::MAX)
}

/// Result of a search.
pub(super) enum Answer {
    /// The best plan found, and a lower bound on all plans.
    Plan { path: Vec<Step>, value: f64, lower_bound: f64, looked_at: u64 },
    /// A proof that there is no plan.
    Nothing,
    /// The search was stopped before it found a plan or proved that there is none.
    Stopped,
}

/// Knowledge about one limit: a plan within it, a proof that there is none, or neither.
enum Verdict {
    Reached(Vec<Step>),
    OutOfReach,
    Unknown,
}

/// Finds the shortest interval between batches, at most `max_s`.
///
/// Each limit that is tried has one of three results. A plan: then its own slowest part is the next upper end. A proof
/// that there is none: this raises the lower end. Undecided at the present width of the search: this raises a
/// provisional lower end.
///
/// The search starts from the plan `known`, if given.
pub(super) fn fastest(costs: &Costs<'_>, max_s: f64, known: Option<Vec<Step>>, control: &Control) -> Answer {
    let mut trial = Attempt { costs, of_host: None, looked_at: 0, control };
    let mut best: Option<(Vec<Step>, f64)> = known.map(|path| {
        let upper_s = costs.bottleneck_s(&path, max_s);
        (path, upper_s)
    });
    let mut lower_s = relaxed::slowest_layer(costs.chain).1;
    if !costs.is_row() {
        // If all positions are nested, the dual prices reach this bound by themselves.
        lower_s = lower_s.max(relaxed::work_s(costs.chain) * (1.0 - ROUNDING));
    }
    // Widths grow from pass to pass: narrow searches decide most limits in a fraction of the time.
    for effort in effort::PASSES {
        if best.is_none() {
            match trial.reach(max_s, effort) {
                Verdict::Reached(path) => best = Some((path.clone(), costs.bottleneck_s(&path, max_s))),
                Verdict::OutOfReach => return Answer::Nothing,
                Verdict::Unknown => {}
            }
        }
        let Some((path, upper_s)) = &mut best else { continue };
        let mut provisional_s = lower_s;
        let mut just_below_failed = false;
        while lower_s < *upper_s && !just_below_failed && !control.should_stop() {
            control.report(Progress { best_s: *upper_s, lower_bound_s: lower_s });
            // Close to the plan, try the largest number below its value: refuting that proves the plan optimal.
            let close = *upper_s - provisional_s <= 1e-4 * *upper_s;
            let limit_s = if close { upper_s.next_down() } else { f64::midpoint(provisional_s, *upper_s) };
            match trial.reach(limit_s, effort) {
                Verdict::Reached(shorter) => {
                    *upper_s = costs.bottleneck_s(&shorter, limit_s);
                    *path = shorter;
                    continue;
                }
                Verdict::OutOfReach => lower_s = lower_s.max(limit_s.next_up()).min(*upper_s),
                Verdict::Unknown => {}
            }
            provisional_s = provisional_s.max(limit_s);
            just_below_failed = close;
        }
        if lower_s >= *upper_s || control.should_stop() {
            break;
        }
    }
    // Many plans share the shortest interval, so look for one with fewer hosts at the end.
    match best {
        Some((path, value)) => {
            let path = with_fewer_hosts(costs, path, rounded_up(value), control);
            let (value, looked_at) = (costs.bottleneck_s(&path, rounded_up(value)), trial.looked_at);
            Answer::Plan { path, value, lower_bound: lower_s.min(value), looked_at }
        }
        None => Answer::Stopped,
    }
}

/// Returns a path that keeps `limit_s` like `path`, with fewer hosts if a narrow search finds one.
fn with_fewer_hosts(costs: &Costs<'_>, path: Vec<Step>, limit_s: f64, control: &Control) -> Vec<Step> {
    let feasible_edges = FeasibleEdges::new(costs, Objective::Hosts, limit_s);
    let Some(hosts) = feasible_edges.path_value(&path) else { return path };
    let start = vec![0.0; costs.chain.types.len()];
    match dual_prices::raise_bound(&feasible_edges, start, hosts - 1.0 + ROUNDING, 20, control) {
        DualSolution::Plan(shorter, _) => shorter,
        DualSolution::Prices(prices) => {
            let found =
                labels::search(&feasible_edges, &[prices], hosts - 1.0, FEWER_BY_ONE, effort::PASSES[0].width, control);
            found.best.map_or(path, |(shorter, _)| shorter)
        }
        DualSolution::NoPath | DualSolution::Stopped => path,
    }
}

/// Returns whether any plan was found, with any interval. The search is narrow, so `false` is no proof. `None` if it
/// was stopped.
pub(super) fn is_possible(costs: &Costs<'_>, control: &Control) -> Option<bool> {
    let mut trial = Attempt { costs, of_host: None, looked_at: 0, control };
    let found = matches!(trial.reach(f64::MAX, effort::PASSES[1]), Verdict::Reached(_));
    (found || !control.should_stop()).then_some(found)
}

/// Decides one limit after another. Each starts from the dual prices of the last one, which are nearly right for the
/// next.
struct Attempt<'a> {
    costs: &'a Costs<'a>,
    of_host: Option<Vec<f64>>,
    looked_at: u64,
    control: &'a Control,
}

impl Attempt<'_> {
    /// Decides whether there is a plan within `limit_s`: first by dual prices, then by a label search.
    fn reach(&mut self, limit_s: f64, effort: SearchWidth) -> Verdict {
        let feasible_edges = FeasibleEdges::new(self.costs, Objective::Throughput, limit_s);
        let start = self.of_host.take().unwrap_or_else(|| dual_prices::by_speed(&feasible_edges));
        let prices = match dual_prices::raise_bound(&feasible_edges, start, ROUNDING, effort.rounds, self.control) {
            DualSolution::Prices(prices) => prices,
            DualSolution::Plan(path, prices) => {
                self.of_host = Some(prices.of_host);
                return Verdict::Reached(path);
            }
            DualSolution::NoPath => return Verdict::OutOfReach,
            DualSolution::Stopped => return Verdict::Unknown,
        };
        self.of_host = Some(prices.of_host.clone());
        // All values are 0 here, so a positive bound proves that there is no plan.
        if prices.bound > ROUNDING {
            return Verdict::OutOfReach;
        }
        let found =
            labels::search(&feasible_edges, &[prices], ROUNDING, |_| f64::NEG_INFINITY, effort.width, self.control);
        self.looked_at += found.looked_at;
        match found.best {
            Some((path, _)) => Verdict::Reached(path),
            None if found.complete => Verdict::OutOfReach,
            None => Verdict::Unknown,
        }
    }
}

/// Finds the plan with the smallest value whose stages and hops keep `limit_s`. Starts from the plan `known`, if given.
pub(super) fn cheapest(
    costs: &Costs<'_>,
    objective: Objective,
    limit_s: f64,
    known: Option<Vec<Step>>,
    control: &Control,
) -> Answer {
    let feasible_edges = FeasibleEdges::new(costs, objective, limit_s);
    let mut best = known.and_then(|path| feasible_edges.path_value(&path).map(|value| (path, value)));
    let start = vec![0.0; costs.chain.types.len()];
    let prices = match dual_prices::raise_bound(&feasible_edges, start, f64::INFINITY, 100, control) {
        DualSolution::Prices(prices) => prices,
        DualSolution::Plan(path, _) => {
            let value = feasible_edges.path_value(&path).unwrap_or(f64::INFINITY);
            return Answer::Plan { path, value, lower_bound: value, looked_at: 0 };
        }
        DualSolution::NoPath => return Answer::Nothing,
        DualSolution::Stopped => {
            let lower_bound = 0.0;
            let plan = |(path, value)| Answer::Plan { path, value, lower_bound, looked_at: 0 };
            return best.map_or(Answer::Stopped, plan);
        }
    };
    let counted = objective != Objective::Latency;
    let better: fn(f64) -> f64 = if counted { FEWER_BY_ONE } else { |value| value - ROUNDING * value };
    // A bound on whole numbers rounds up to the next one.
    let mut lower_bound = if counted { (prices.bound - ROUNDING).ceil().max(0.0) } else { prices.bound.max(0.0) };
    let pool = [prices];
    let mut looked_at = 0;
    for effort in effort::PASSES {
        let below = best.as_ref().map_or(f64::MAX, |(_, value)| better(*value));
        let found = labels::search(&feasible_edges, &pool, below, better, effort.width, control);
        looked_at += found.looked_at;
        best = found.best.or(best);
        // The search dropped no label, so nothing is better than the best plan.
        if found.complete {
            let Some((_, value)) = &best else { return Answer::Nothing };
            lower_bound = *value;
        }
        if let Some((_, value)) = &best {
            control.report(Progress { best_s: *value, lower_bound_s: lower_bound });
        }
        if found.complete || control.should_stop() {
            break;
        }
    }
    match best {
        Some((path, value)) => Answer::Plan { path, value, lower_bound: lower_bound.min(value), looked_at },
        None => Answer::Stopped,
    }
}
