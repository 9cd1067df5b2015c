//! Moves the limit, or the price of a plan, until the best plan found and the proof that nothing is better meet.

use super::cost::{Costs, Step};
use super::dual_prices::{self, DualSolution};
use super::feasible_edges::FeasibleEdges;
use super::labels;
use super::problem::Objective;
use super::relaxed;
use crate::control::{Control, Progress};
use crate::planner::effort::chain as effort;
use crate::planner::effort::chain::SearchWidth;

/// Bounds within this share of each other count as equal: sums of times round.
const ROUNDING: f64 = 1e-9;

/// Hosts and bits are counted: what is better than a plan is better by one.
const FEWER_BY_ONE: fn(f64) -> f64 = |value| value - 1.0 + ROUNDING;

/// A limit that sums of times reach although they round.
pub(super) fn rounded_up(limit_s: f64) -> f64 {
    (limit_s * (1.0 + 1e-12)).min(f64::MAX)
}

/// How a search ended.
pub(super) enum Answer {
    /// The best plan found, and what no plan is below.
    Plan { path: Vec<Step>, value: f64, lower_bound: f64, looked_at: u64 },
    /// There is no plan.
    Nothing,
    /// Told to stop before there was a plan or a proof that there is none.
    Stopped,
}

/// What is known about one limit.
enum Verdict {
    Reached(Vec<Step>),
    OutOfReach,
    Unknown,
}

/// The shortest interval between batches, not above `max_s`.
///
/// Every limit tried either has a plan, whose own slowest part is the next upper end, or is shown to have none, which
/// raises the lower end, or stays undecided at the present width of the search, which raises a provisional lower end.
///
/// It starts from `known`, a plan, if that is given.
pub(super) fn fastest(costs: &Costs<'_>, max_s: f64, known: Option<Vec<Step>>, control: &Control) -> Answer {
    let mut trial = Attempt { costs, of_host: None, looked_at: 0, control };
    let mut best: Option<(Vec<Step>, f64)> = known.map(|path| {
        let upper_s = costs.bottleneck_s(&path, max_s);
        (path, upper_s)
    });
    let mut lower_s = relaxed::slowest_layer(costs.chain).1;
    if !costs.is_row() {
        lower_s = lower_s.max(relaxed::work_s(costs.chain) * (1.0 - ROUNDING)); // a row comes to it by itself
    }
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
    match best {
        Some((path, value)) => {
            let path = with_fewer_hosts(costs, path, rounded_up(value), control);
            let (value, looked_at) = (costs.bottleneck_s(&path, rounded_up(value)), trial.looked_at);
            Answer::Plan { path, value, lower_bound: lower_s.min(value), looked_at }
        }
        None => Answer::Stopped,
    }
}

/// A path that keeps within `limit_s` as `path` does, on fewer hosts if a narrow search finds one.
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
        DualSolution::NoWay | DualSolution::Stopped => path,
    }
}

/// Whether a plan was found at all, however slow; a narrow search, so "no" is no proof. `None` if it was stopped.
pub(super) fn is_possible(costs: &Costs<'_>, control: &Control) -> Option<bool> {
    let mut trial = Attempt { costs, of_host: None, looked_at: 0, control };
    let found = matches!(trial.reach(f64::MAX, effort::PASSES[1]), Verdict::Reached(_));
    (found || !control.should_stop()).then_some(found)
}

/// Decides one limit after the other, each starting from the prices of the last.
struct Attempt<'a> {
    costs: &'a Costs<'a>,
    of_host: Option<Vec<f64>>,
    looked_at: u64,
    control: &'a Control,
}

impl Attempt<'_> {
    fn reach(&mut self, limit_s: f64, effort: SearchWidth) -> Verdict {
        let feasible_edges = FeasibleEdges::new(self.costs, Objective::Throughput, limit_s);
        let start = self.of_host.take().unwrap_or_else(|| dual_prices::by_speed(&feasible_edges));
        let prices = match dual_prices::raise_bound(&feasible_edges, start, ROUNDING, effort.rounds, self.control) {
            DualSolution::Prices(prices) => prices,
            DualSolution::Plan(path, prices) => {
                self.of_host = Some(prices.of_host);
                return Verdict::Reached(path);
            }
            DualSolution::NoWay => return Verdict::OutOfReach,
            DualSolution::Stopped => return Verdict::Unknown,
        };
        self.of_host = Some(prices.of_host.clone());
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

/// The plan of smallest value whose stages and hops keep within `limit_s`; `known` is one, if that is given.
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
        DualSolution::NoWay => return Answer::Nothing,
        DualSolution::Stopped => {
            let lower_bound = 0.0;
            let plan = |(path, value)| Answer::Plan { path, value, lower_bound, looked_at: 0 };
            return best.map_or(Answer::Stopped, plan);
        }
    };
    let counted = objective != Objective::Latency;
    let better: fn(f64) -> f64 = if counted { FEWER_BY_ONE } else { |value| value - ROUNDING * value };
    let mut lower_bound = if counted { (prices.bound - ROUNDING).ceil().max(0.0) } else { prices.bound.max(0.0) };
    let pool = [prices];
    let mut looked_at = 0;
    for effort in effort::PASSES {
        let below = best.as_ref().map_or(f64::MAX, |(_, value)| better(*value));
        let found = labels::search(&feasible_edges, &pool, below, better, effort.width, control);
        looked_at += found.looked_at;
        best = found.best.or(best);
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
