//! Uneven hosts in a row: who takes which slice of a chain of layers, so that the slowest stage or transfer is short.
//!
//! A **crew** is one or more hosts of one type that share a stage; each takes its turn, so `r` hosts pass a batch on
//! `r` times as often. A **position** is a cut between layers. In a chain position `p` lies before layer `p`, 0 before
//! all of them. In a branching model a position is a down-set of layers, and a stage lies between two of which the
//! later one holds the earlier. A plan is a path from position 0 to the last one, each step a stage of some crew, that
//! uses no type more often than it has hosts. Everything that is asked (throughput, latency, few hosts, few bits lost;
//! pins, links, quantised edges) is expressed in two functions of this path: what a stage costs and what a hop between
//! two crews costs (`cost`).
//!
//! `feasible_edges` keeps the stages and hops that are within a time limit; `dual_prices` proves that a limit is out of
//! reach by putting a price on hosts; `labels` looks for a path within host counts, guided and bounded by those prices;
//! `search` moves the limit until path and proof meet. `relaxed` bounds the plans of all cuts where these are too many
//! to look at, and `shortage` says what is missing where nothing fits.

mod cost;
mod dual_prices;
mod feasible_edges;
mod labels;
mod problem;
mod relaxed;
mod search;
mod shortage;

pub use problem::{Chain, Hop, HostType, Objective};

use crate::control::Control;
use crate::error::Error;
use cost::{Costs, Step};
use search::Answer;

/// One stage of a plan. Times are for one batch.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct ChainStage {
    /// Index into [`Chain::types`].
    pub host_type: usize,
    /// Hosts of that type that share the stage.
    pub replicas: usize,
    /// Position before the stage; in a chain, its first layer, from 0.
    pub first: usize,
    /// Position behind it; in a chain, one behind its last layer.
    pub end: usize,
    /// Seconds that one host computes on a batch.
    pub compute_s: f64,
    /// Seconds between batches that the stage can keep up: compute over replicas.
    pub interval_s: f64,
    /// Bytes that the stage needs on each of its hosts; the host must have more.
    pub memory_bytes: f64,
}

/// What crosses a position of a plan: before the first stage, between two, or behind the last.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct ChainHop {
    /// Bits for each value; the first of [`Chain::bits`] unless the objective chose fewer.
    pub bits: u32,
    /// Bytes of one batch at that many bits.
    pub bytes: f64,
    /// Seconds that one batch is under way.
    pub seconds: f64,
    /// Seconds between batches that the hop can keep up.
    pub interval_s: f64,
}

/// A plan and its certificate.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct ChainPlan {
    /// In order of the layers.
    pub stages: Vec<ChainStage>,
    /// One more than stages: into the first, between neighbours, out of the last.
    pub hops: Vec<ChainHop>,
    /// Seconds between batches: the largest interval of all stages and hops.
    pub interval_s: f64,
    /// Seconds that one batch takes through an idle pipeline: all compute and all hops.
    pub latency_s: f64,
    /// What the objective counts: interval, latency, hosts or bits lost.
    pub value: f64,
    /// No plan has a smaller value, wherever the model is cut. Equal to `value` up to 1e-9 of it when the search came
    /// to its end and looked at all cuts.
    pub lower_bound: f64,
    /// No plan with the cuts that were searched has a smaller value.
    pub searched_bound: f64,
    /// Whether all positions were searched; else those of [`Chain::row`] alone.
    pub has_all_positions: bool,
    /// Stages that the search looked at.
    pub looked_at: u64,
}

/// The best plan for `chain`.
///
/// `max_interval_s` is a condition for every objective: no stage and no hop may take longer between batches. The same
/// question has the same answer, unless `control` stops the search: then it is the best plan so far with its bound.
///
/// # Errors
/// [`Error::Argument`] and [`Error::Cluster`] for a question that makes no sense, [`Error::Infeasible`] saying what is
/// short and by how much, [`Error::TimedOut`] or [`Error::Cancelled`] when stopped before the first plan.
///
/// ```
/// use hpgo::planner::chain::{Chain, HostType, Objective, partition};
///
/// let host = |name: &str, second: f64| HostType::new(name, 1, 1e9, vec![second; 6]);
/// let chain = Chain::new(vec![1e6; 6], vec![0.0; 7], vec![host("slow", 2.0), host("fast", 1.0)]);
/// let plan = partition(&chain, Objective::Throughput, None, &hpgo::Control::default())?;
/// assert_eq!(plan.interval_s, 4.0); // two layers on the slow host, four on the fast one
/// # Ok::<(), hpgo::Error>(())
/// ```
pub fn partition(
    chain: &Chain,
    objective: Objective,
    max_interval_s: Option<f64>,
    control: &Control,
) -> Result<ChainPlan, Error> {
    chain.check(objective, max_interval_s)?;
    let limit_s = search::rounded_up(max_interval_s.unwrap_or(f64::MAX));
    let search = |costs: &Costs<'_>, known: Option<Vec<Step>>| match objective {
        Objective::Throughput => search::fastest(costs, limit_s, known, control),
        _ => search::cheapest(costs, objective, limit_s, known, control),
    };
    let row = if chain.is_row() { None } else { Some(chain.along_row()) };
    let first = row.as_ref().unwrap_or(chain);
    if let Some(error) = shortage::certain(&Costs::without_stages(chain), max_interval_s) {
        return Err(error);
    }
    let costs = Costs::without_stages(first);
    let least = relaxed::bound(chain, objective, limit_s);
    let mut answer = search(&costs, None);
    let mut has_all_positions = chain.is_row();
    let reaches = |answer: &Answer| matches!(answer, Answer::Plan { value, .. } if *value <= least * (1.0 + 1e-9));
    // What can't be listed is as far from the answer as what there was no time for.
    let whole = if chain.is_row() || reaches(&answer) { None } else { Costs::new(chain, control) };
    if let Some(whole) = &whole {
        let at = |step: &Step| Step { crew: step.crew, first: chain.row[step.first], end: chain.row[step.end] };
        let known = match &answer {
            Answer::Plan { path, .. } => Some(path.iter().map(at).collect()),
            Answer::Nothing | Answer::Stopped => None,
        };
        has_all_positions = true;
        answer = search(whole, known);
    }
    let is_partial = chain.is_restricted || !has_all_positions;
    match answer {
        Answer::Plan { path, value, lower_bound: searched_bound, looked_at } => {
            let costs = whole.as_ref().unwrap_or(&costs);
            let searched_bound = searched_bound.max(least).min(value);
            let lower_bound = if is_partial { least.min(value) } else { searched_bound };
            let mut plan = costs.describe(&path, objective, limit_s, value, lower_bound, looked_at);
            plan.searched_bound = searched_bound;
            plan.has_all_positions = has_all_positions || lower_bound >= value * (1.0 - 1e-9);
            if whole.is_none() && !chain.is_row() {
                for stage in &mut plan.stages {
                    (stage.first, stage.end) = (chain.row[stage.first], chain.row[stage.end]);
                }
            }
            Ok(plan)
        }
        Answer::Stopped => Err(match control.error() {
            Error::TimedOut { .. } => Error::TimedOut { known: at_least(objective, least) },
            interrupted => interrupted,
        }),
        Answer::Nothing => Err(shortage::explain(whole.as_ref().unwrap_or(&costs), max_interval_s, control)),
    }
}

/// What a lower bound says of all plans, behind the statement that none was found.
fn at_least(objective: Objective, bound: f64) -> String {
    match objective {
        Objective::Throughput if bound > 0.0 => format!("; each takes at least {bound:.6} s between batches"),
        Objective::Latency if bound > 0.0 => format!("; each takes at least {bound:.6} s for a batch"),
        Objective::Hosts => format!("; each takes at least {bound:.0} of the hosts"),
        _ => String::new(),
    }
}
