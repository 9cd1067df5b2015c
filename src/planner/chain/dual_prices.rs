//! Prices on hosts: a bound on every plan from the shortest path that ignores how many hosts there are.
//!
//! Lagrangian relaxation. Each use of a host of type `t` costs `λ_t ≥ 0`; the cheapest path pays no more than any plan
//! does, and a plan pays at most `Σ λ_t n_t`. So `value ≥ cheapest(λ) − Σ λ_t n_t` for every plan, and where the value
//! is 0 for all (throughput at a limit), a positive right side proves that there is none. The cheapest way on from
//! every position comes with it and bounds what is left of a partial plan just as well (Handler & Zang, 1980).

use super::cost::Step;
use super::feasible_edges::FeasibleEdges;
use super::problem::{HostType, Objective};
use crate::control::Control;

/// Prices and the cheapest way on from everywhere.
#[derive(Clone)]
pub(super) struct Prices {
    /// Price of one host, by type.
    pub(super) of_host: Vec<f64>,
    /// Cheapest way on from a position, the crew before it known: `[crew][position]`; infinite where there is none.
    on: Vec<Vec<f64>>,
    /// The same with the crew behind the position known, its first hop not paid.
    from: Vec<Vec<f64>>,
    /// No plan has a smaller value.
    pub(super) bound: f64,
}

impl Prices {
    /// `None` if `control` stopped it: in a long chain, each position looks at every layer behind it.
    pub(super) fn new(feasible_edges: &FeasibleEdges<'_>, of_host: Vec<f64>, control: &Control) -> Option<Self> {
        let costs = feasible_edges.costs;
        let (layers, crews) = (costs.last, costs.crews.len());
        let mut on = vec![vec![f64::INFINITY; layers + 1]; crews];
        let mut from = vec![vec![f64::INFINITY; layers + 1]; crews];
        for (crew, on) in on.iter_mut().enumerate() {
            on[layers] = feasible_edges.hop_value(layers, Some(crew), None).unwrap_or(f64::INFINITY);
        }
        for position in (0..layers).rev() {
            if position % 128 == 0 && control.should_stop() {
                return None; // a look at the clock costs more than many a position
            }
            let mut cheapest = f64::INFINITY;
            for crew in 0..crews {
                let fee = of_host[costs.crews[crew].kind] * costs.crews[crew].replicas as f64;
                let way = feasible_edges
                    .ends(crew, position)
                    .map(|end| feasible_edges.stage_value(crew, position, end) + on[crew][end])
                    .fold(f64::INFINITY, f64::min);
                from[crew][position] = fee + way;
                cheapest = cheapest.min(fee + way);
            }
            for (crew, on) in on.iter_mut().enumerate() {
                on[position] = if feasible_edges.is_open(position) {
                    cheapest
                } else {
                    next_crew(feasible_edges, &from, position, Some(crew)).map_or(f64::INFINITY, |(_, price)| price)
                };
            }
        }
        let budget: f64 = costs.chain.types.iter().zip(&of_host).map(|(host, price)| host.hosts as f64 * price).sum();
        let bound = next_crew(feasible_edges, &from, 0, None).map_or(f64::INFINITY, |(_, price)| price - budget);
        Some(Self { of_host, on, from, bound })
    }

    /// Cheapest way on from `position` behind `crew`.
    pub(super) fn way_on(&self, crew: usize, position: usize) -> f64 {
        self.on[crew][position]
    }

    /// A path that is cheapest at these prices, and how many hosts of each type it uses; `None` where there is none.
    fn cheapest_path(&self, feasible_edges: &FeasibleEdges<'_>) -> Option<(Vec<Step>, Vec<usize>)> {
        let costs = feasible_edges.costs;
        let mut uses = vec![0; self.of_host.len()];
        let mut path: Vec<Step> = Vec::new();
        let mut first = 0;
        while first < costs.last {
            let (crew, _) = next_crew(feasible_edges, &self.from, first, path.last().map(|step| step.crew))?;
            let price = |end: usize| feasible_edges.stage_value(crew, first, end) + self.on[crew][end];
            let end = feasible_edges.ends(crew, first).min_by(|&one, &other| price(one).total_cmp(&price(other)))?;
            uses[costs.crews[crew].kind] += costs.crews[crew].replicas;
            path.push(Step { crew, first, end });
            first = end;
        }
        Some((path, uses))
    }
}

/// The crew that continues most cheaply from `position` behind `from`, and the price of all that follows.
fn next_crew(
    feasible_edges: &FeasibleEdges<'_>,
    prices: &[Vec<f64>],
    position: usize,
    from: Option<usize>,
) -> Option<(usize, f64)> {
    let mut best: Option<(usize, f64)> = None;
    for (crew, prices) in prices.iter().enumerate() {
        let way = prices[position];
        let beaten = |price: f64| best.is_some_and(|(_, best)| best <= price);
        if way == f64::INFINITY || beaten(way) {
            continue; // before the hop is looked up: most crews end here
        }
        if let Some(hop) = feasible_edges.hop_value(position, from, Some(crew))
            && !beaten(way + hop)
        {
            best = Some((crew, way + hop));
        }
    }
    best
}

/// What looking for prices brought.
pub(super) enum DualSolution {
    /// The best prices found; no plan has a value below their bound.
    Prices(Prices),
    /// A cheapest path keeps to the host counts, and its value is the bound itself: nothing is better.
    Plan(Vec<Step>, Prices),
    /// No path leads to the end, host counts aside.
    NoWay,
    /// It was stopped before there were any prices.
    Stopped,
}

/// Improves the bound in at most `rounds` steps from `start`; stops as soon as it exceeds `enough`.
pub(super) fn raise_bound(
    feasible_edges: &FeasibleEdges<'_>,
    start: Vec<f64>,
    enough: f64,
    rounds: usize,
    control: &Control,
) -> DualSolution {
    let Some(prices) = Prices::new(feasible_edges, start, control) else { return DualSolution::Stopped };
    if prices.bound == f64::INFINITY {
        DualSolution::NoWay
    } else if feasible_edges.objective == Objective::Throughput {
        by_simplex(feasible_edges, prices, enough, rounds, control)
    } else {
        by_slopes(feasible_edges, prices, enough, rounds, control)
    }
}

/// Polyak's subgradient method, for values that differ from path to path.
///
/// Steps go along (uses / hosts − 1) in total prices `μ_t = λ_t n_t`, so types of one host and of many move alike.
fn by_slopes(
    feasible_edges: &FeasibleEdges<'_>,
    mut prices: Prices,
    enough: f64,
    rounds: usize,
    control: &Control,
) -> DualSolution {
    let hosts: Vec<f64> = feasible_edges.costs.chain.types.iter().map(|host| (host.hosts as f64).max(1.0)).collect();
    let mut best = prices.clone();
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
        let Some(next) = Prices::new(feasible_edges, of_host, control) else { break };
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

/// Column generation, for values that are 0 on every path: only the ratios of prices matter, and their total is 1.
///
/// A mixture of paths uses each type at some share of its hosts; the mixture whose largest share is smallest and the
/// prices that prove it are the two sides of a matrix game. Solved as max Σy with Σ y·share ≤ 1 by the revised simplex
/// method, whose next column is the cheapest path at the present prices (Gilmore & Gomory, 1961). Asking half way
/// towards the best prices so far keeps early steps from jumping (Wentges, 1997).
fn by_simplex(
    feasible_edges: &FeasibleEdges<'_>,
    start: Prices,
    enough: f64,
    rounds: usize,
    control: &Control,
) -> DualSolution {
    let types = &feasible_edges.costs.chain.types;
    let size = types.len();
    let hosts: Vec<f64> = types.iter().map(|host| (host.hosts as f64).max(1.0)).collect();
    // Rows of the basis inverse, each with its right side behind it: a little uneven, so that no step is of length 0.
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
        if uses.iter().zip(types).all(|(&uses, host)| uses <= host.hosts) {
            return DualSolution::Plan(path, best);
        }
        let shares: Vec<f64> = uses.iter().zip(&hosts).map(|(&uses, hosts)| uses as f64 / hosts).collect();
        let worth = |rows: &[Vec<f64>], is_path: &[bool]| -> Vec<f64> {
            let paths = || rows.iter().zip(is_path).filter(|(_, is_path)| **is_path);
            (0..size).map(|kind| paths().map(|(row, _)| row[kind]).sum::<f64>().max(0.0)).collect()
        };
        let price: f64 = worth(&rows, &is_path).iter().zip(&shares).map(|(worth, share)| worth * share).sum();
        if price < 1.0 - 1e-9 {
            enter(&mut rows, &mut is_path, &shares);
            half_way = true;
        } else if half_way {
            half_way = false; // this path is known: ask at the simplex's own prices
        } else {
            break; // optimal
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
        let Some(next) = Prices::new(feasible_edges, of_host, control) else { break };
        asked = next;
        if asked.bound > best.bound {
            best = asked.clone();
        }
    }
    DualSolution::Prices(best)
}

/// One step of the simplex method: the path with these `shares` takes the place of the row that gives out first.
fn enter(rows: &mut [Vec<f64>], is_path: &mut [bool], shares: &[f64]) {
    let size = shares.len();
    let column: Vec<f64> =
        rows.iter().map(|row| row.iter().zip(shares).map(|(cell, share)| cell * share).sum()).collect();
    let reach = |row: usize| rows[row][size] / column[row];
    let leaving =
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

/// Prices in proportion to speed: what part of the whole chain a host does in a given time.
pub(super) fn by_speed(feasible_edges: &FeasibleEdges<'_>) -> Vec<f64> {
    let costs = feasible_edges.costs;
    let types = &costs.chain.types;
    let speed: Vec<f64> = types.iter().map(|host| 1.0 / host.time_s.iter().sum::<f64>().max(1e-300)).collect();
    let total: f64 = types.iter().zip(&speed).map(|(host, speed)| host.hosts as f64 * speed).sum();
    if total > 0.0 && total.is_finite() {
        speed.iter().map(|speed| speed / total).collect()
    } else {
        let hosts: usize = types.iter().map(|host| host.hosts).sum();
        vec![1.0 / hosts.max(1) as f64; types.len()]
    }
}
