//! Dual prices of hosts: a bound on every plan from a shortest path that ignores the numbers of hosts.
//!
//! This is a Lagrangian relaxation. Each use of a host of type `t` costs `λ_t ≥ 0`. The cheapest path costs at most as
//! much as any plan, and the hosts of a plan cost at most `Σ λ_t n_t`. So `value ≥ cheapest(λ) − Σ λ_t n_t` for every
//! plan. If the value of every plan is 0 (throughput at a limit), a positive right side proves that there is none. The
//! cheapest continuations from all positions come with it, and bound the rest of a partial plan in the same way
//! (Handler & Zang, 1980).

use super::cost::Step;
use super::feasible_edges::FeasibleEdges;
use super::problem::{HostType, Objective};
use crate::control::Control;

/// Dual prices, with the cheapest continuation from every position.
#[derive(Clone)]
pub(super) struct DualPrices {
    /// Dual price of using one host, by type.
    pub(super) of_host: Vec<f64>,
    /// Cost of the cheapest continuation behind a host set: `[host_set][position]`. Infinite if there is none.
    on: Vec<Vec<f64>>,
    /// Cost of the cheapest continuation that begins with a host set, without the hop into it: `[host_set][position]`.
    from: Vec<Vec<f64>>,
    /// Lower bound on the value of every plan.
    pub(super) bound: f64,
}

impl DualPrices {
    /// Computes all continuations at given prices, from the last position to the first. `None` if `control` has
    /// stopped.
    pub(super) fn new(feasible_edges: &FeasibleEdges<'_>, of_host: Vec<f64>, control: &Control) -> Option<Self> {
        let costs = feasible_edges.costs;
        let (layers, host_sets) = (costs.last, costs.host_sets.len());
        let mut on = vec![vec![f64::INFINITY; layers + 1]; host_sets];
        let mut from = vec![vec![f64::INFINITY; layers + 1]; host_sets];
        for (host_set, on) in on.iter_mut().enumerate() {
            on[layers] = feasible_edges.hop_value(layers, Some(host_set), None).unwrap_or(f64::INFINITY);
        }
        for position in (0..layers).rev() {
            if position % 128 == 0 && control.should_stop() {
                return None; // checked rarely, because reading the clock takes longer than many positions
            }
            let mut cheapest = f64::INFINITY;
            for host_set in 0..host_sets {
                let fee = of_host[costs.host_sets[host_set].kind] * costs.host_sets[host_set].replicas as f64;
                let way = feasible_edges
                    .ends(host_set, position)
                    .map(|end| feasible_edges.stage_value(host_set, position, end) + on[host_set][end])
                    .fold(f64::INFINITY, f64::min);
                from[host_set][position] = fee + way;
                cheapest = cheapest.min(fee + way);
            }
            for (host_set, on) in on.iter_mut().enumerate() {
                // Over an open position all hops are free, so all host sets share one continuation.
                on[position] = if feasible_edges.is_open(position) {
                    cheapest
                } else {
                    next_crew(feasible_edges, &from, position, Some(host_set)).map_or(f64::INFINITY, |(_, price)| price)
                };
            }
        }
        let budget: f64 = costs.chain.types.iter().zip(&of_host).map(|(host, price)| host.hosts as f64 * price).sum();
        let bound = next_crew(feasible_edges, &from, 0, None).map_or(f64::INFINITY, |(_, price)| price - budget);
        Some(Self { of_host, on, from, bound })
    }

    /// Returns the cost of the cheapest continuation from `position` behind a host set.
    pub(super) fn way_on(&self, host_set: usize, position: usize) -> f64 {
        self.on[host_set][position]
    }

    /// Returns a cheapest path at these prices and the number of hosts of each type that it uses, or `None` if there is
    /// none.
    fn cheapest_path(&self, feasible_edges: &FeasibleEdges<'_>) -> Option<(Vec<Step>, Vec<usize>)> {
        let costs = feasible_edges.costs;
        let mut uses = vec![0; self.of_host.len()];
        let mut path: Vec<Step> = Vec::new();
        let mut first = 0;
        while first < costs.last {
            let (host_set, _) = next_crew(feasible_edges, &self.from, first, path.last().map(|step| step.host_set))?;
            let price = |end: usize| feasible_edges.stage_value(host_set, first, end) + self.on[host_set][end];
            let end =
                feasible_edges.ends(host_set, first).min_by(|&one, &other| price(one).total_cmp(&price(other)))?;
            uses[costs.host_sets[host_set].kind] += costs.host_sets[host_set].replicas;
            path.push(Step { host_set, first, end });
            first = end;
        }
        Some((path, uses))
    }
}

/// Returns the host set that continues most cheaply from `position` behind `from`, with the cost of the whole
/// continuation.
fn next_crew(
    feasible_edges: &FeasibleEdges<'_>,
    prices: &[Vec<f64>],
    position: usize,
    from: Option<usize>,
) -> Option<(usize, f64)> {
    let mut best: Option<(usize, f64)> = None;
    for (host_set, prices) in prices.iter().enumerate() {
        let way = prices[position];
        let is_beaten = |price: f64| best.is_some_and(|(_, best)| best <= price);
        if way == f64::INFINITY || is_beaten(way) {
            continue; // tested before the hop is looked up, because most host sets fail here
        }
        if let Some(hop) = feasible_edges.hop_value(position, from, Some(host_set))
            && !is_beaten(way + hop)
        {
            best = Some((host_set, way + hop));
        }
    }
    best
}

/// Result of a search for dual prices.
pub(super) enum DualSolution {
    /// The best dual prices found. No plan has a value below their bound.
    Prices(DualPrices),
    /// A cheapest path that keeps the host counts. Its value is the bound, so no plan is better.
    Plan(Vec<Step>, DualPrices),
    /// There is no path to the end, even without limits on hosts.
    NoPath,
    /// The search was stopped before it had any prices.
    Stopped,
}

/// Raises the bound in at most `rounds` steps from the prices `start`. Stops as soon as the bound exceeds `enough`.
pub(super) fn raise_bound(
    feasible_edges: &FeasibleEdges<'_>,
    start: Vec<f64>,
    enough: f64,
    rounds: usize,
    control: &Control,
) -> DualSolution {
    let Some(prices) = DualPrices::new(feasible_edges, start, control) else { return DualSolution::Stopped };
    if prices.bound == f64::INFINITY {
        DualSolution::NoPath
    // At a throughput limit every value is 0, so only ratios of prices matter, and column generation finds the best
    // ones.
    } else if feasible_edges.objective == Objective::Throughput {
        by_simplex(feasible_edges, prices, enough, rounds, control)
    } else {
        by_slopes(feasible_edges, prices, enough, rounds, control)
    }
}

/// Raises the bound with Polyak's subgradient method, for values that differ from path to path.
///
/// Steps go along (uses / hosts − 1) in total prices `μ_t = λ_t n_t`, so that types with one host and with many change
/// alike.
fn by_slopes(
    feasible_edges: &FeasibleEdges<'_>,
    mut prices: DualPrices,
    enough: f64,
    rounds: usize,
    control: &Control,
) -> DualSolution {
    let hosts: Vec<f64> = feasible_edges.costs.chain.types.iter().map(|host| (host.hosts as f64).max(1.0)).collect();
    let mut best = prices.clone();
    // The optimal bound is unknown, so the step length is based on a target slightly above the best bound so far. The
    // distance is halved whenever the target seems out of reach.
    let mut ambition = (0.1 * prices.bound.abs()).max(1e-3);
    let mut idle = 0;
    for _ in 0..rounds {
        if best.bound > enough || control.should_stop() {
            break;
        }
        let Some((path, uses)) = prices.cheapest_path(feasible_edges) else { break };
        let slack = |(kind, host): (usize, &HostType)| uses[kind] <= host.hosts;
        if feasible_edges.costs.chain.types.iter().enumerate().all(slack) {
            let value = feasible_edges.path_value(&path).unwrap_or(f64::INFINITY);
            // The path is a plan, and its value equals the bound: duality gap 0.
            if value <= prices.bound.max(best.bound) + 1e-12 * value.abs() {
                return DualSolution::Plan(path, best);
            }
        }
        let slope: Vec<f64> = uses
            .iter()
            .zip(&hosts)
            .zip(&prices.of_host)
            .map(|((&uses, &hosts), &price)| {
                let slope = uses as f64 / hosts - 1.0;
                // Dual prices must not become negative, so a direction that would lower a price of 0 is cut off.
                if price == 0.0 { slope.max(0.0) } else { slope }
            })
            .collect();
        let steepness: f64 = slope.iter().map(|slope| slope * slope).sum();
        if steepness == 0.0 {
            break;
        }
        let step = (best.bound + ambition - prices.bound).max(0.0) / steepness;
        let of_host = prices
            .of_host
            .iter()
            .zip(&slope)
            .zip(&hosts)
            .map(|((price, slope), hosts)| (price + step * slope / hosts).max(0.0))
            .collect();
        let Some(next) = DualPrices::new(feasible_edges, of_host, control) else { break };
        prices = next;
        if prices.bound > best.bound + 0.05 * ambition {
            idle = 0;
        } else {
            idle += 1;
            if idle == 4 {
                idle = 0;
                ambition *= 0.5;
            }
        }
        if prices.bound > best.bound {
            best = prices.clone();
        }
    }
    DualSolution::Prices(best)
}

/// Raises the bound by column generation, for values that are 0 on every path. Only ratios of prices matter, and their
/// total is 1.
///
/// A mixture of paths uses each type at some share of its hosts. The mixture whose largest share is smallest, and the
/// prices that prove it, are the two sides of a matrix game. It is solved as max Σy with Σ y·share ≤ 1 by the revised
/// simplex method, whose next column is the cheapest path at the present prices (Gilmore & Gomory, 1961). The query
/// halfway between these prices and the best ones so far keeps early steps from oscillating (Wentges, 1997).
fn by_simplex(
    feasible_edges: &FeasibleEdges<'_>,
    start: DualPrices,
    enough: f64,
    rounds: usize,
    control: &Control,
) -> DualSolution {
    let types = &feasible_edges.costs.chain.types;
    let size = types.len();
    let hosts: Vec<f64> = types.iter().map(|host| (host.hosts as f64).max(1.0)).collect();
    // Rows of the basis inverse, each followed by its right side. The right sides differ slightly, so that no step of
    // the simplex method has length 0 (degeneracy).
    let mut rows: Vec<Vec<f64>> = (0..size)
        .map(|row| {
            let mut cells = vec![0.0; size + 1];
            cells[row] = 1.0;
            cells[size] = 1.0 + 1e-7 * (row + 1) as f64;
            cells
        })
        .collect();
    let mut is_path = vec![false; size];
    let (mut best, mut asked, mut half_way) = (start.clone(), start, true);
    for _ in 0..rounds {
        if best.bound > enough || control.should_stop() {
            break;
        }
        let Some((path, uses)) = asked.cheapest_path(feasible_edges) else { break };
        // A single path that keeps all host counts is a plan: the limit can be reached.
        if uses.iter().zip(types).all(|(&uses, host)| uses <= host.hosts) {
            return DualSolution::Plan(path, best);
        }
        let shares: Vec<f64> = uses.iter().zip(&hosts).map(|(&uses, hosts)| uses as f64 / hosts).collect();
        let worth = |rows: &[Vec<f64>], is_path: &[bool]| -> Vec<f64> {
            let paths = || rows.iter().zip(is_path).filter(|(_, is_path)| **is_path);
            (0..size).map(|kind| paths().map(|(row, _)| row[kind]).sum::<f64>().max(0.0)).collect()
        };
        let price: f64 = worth(&rows, &is_path).iter().zip(&shares).map(|(worth, share)| worth * share).sum();
        // The path has positive reduced cost, so it enters the basis.
        if price < 1.0 - 1e-9 {
            enter(&mut rows, &mut is_path, &shares);
            half_way = true;
        } else if half_way {
            half_way = false; // no new path at the smoothed prices, so query at the simplex method's own prices
        } else {
            break; // no new path at these prices either: they are optimal
        }
        let worth = worth(&rows, &is_path);
        let total: f64 = worth.iter().sum();
        if total <= 0.0 {
            break;
        }
        let pull = if half_way { 0.5 } else { 0.0 };
        let of_host = (0..size)
            .map(|kind| pull * best.of_host[kind] + (1.0 - pull) * worth[kind] / total / hosts[kind])
            .collect();
        let Some(next) = DualPrices::new(feasible_edges, of_host, control) else { break };
        asked = next;
        if asked.bound > best.bound {
            best = asked.clone();
        }
    }
    DualSolution::Prices(best)
}

/// Performs one step of the simplex method: the path with these `shares` replaces the row that reaches 0 first.
fn enter(rows: &mut [Vec<f64>], is_path: &mut [bool], shares: &[f64]) {
    let size = shares.len();
    let column: Vec<f64> =
        rows.iter().map(|row| row.iter().zip(shares).map(|(cell, share)| cell * share).sum()).collect();
    let reach = |row: usize| rows[row][size] / column[row];
    let leaving =
        // A pivot near 0 would amplify rounding errors.
        (0..size).filter(|&row| column[row] > 1e-9).min_by(|&one, &other| reach(one).total_cmp(&reach(other)));
    let Some(leaving) = leaving else { return };
    for cell in &mut rows[leaving] {
        *cell /= column[leaving];
    }
    let pivot = rows[leaving].clone();
    for (row, factor) in
        rows.iter_mut().zip(&column).enumerate().filter(|(row, _)| *row != leaving).map(|(_, pair)| pair)
    {
        for (cell, pivot) in row.iter_mut().zip(&pivot) {
            *cell -= factor * pivot;
        }
    }
    is_path[leaving] = true;
}

/// Returns prices in proportion to speed: the part of the whole chain that a host computes in a given time.
pub(super) fn by_speed(feasible_edges: &FeasibleEdges<'_>) -> Vec<f64> {
    let costs = feasible_edges.costs;
    let types = &costs.chain.types;
    let speed: Vec<f64> = types.iter().map(|host| 1.0 / host.time_s.iter().sum::<f64>().max(1e-300)).collect();
    let total: f64 = types.iter().zip(&speed).map(|(host, speed)| host.hosts as f64 * speed).sum();
    // Without usable speeds, start with equal dual prices.
    if total > 0.0 && total.is_finite() {
        speed.iter().map(|speed| speed / total).collect()
    } else {
        let hosts: usize = types.iter().map(|host| host.hosts).sum();
        vec![1.0 / hosts.max(1) as f64; types.len()]
    }
}
