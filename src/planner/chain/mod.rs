//! Partitions of layers over uneven hosts such that the slowest stage or transfer is as short as possible.
//!
//! A **host set** is one or more hosts of one type that share a stage. They take turns, so `r` hosts pass on batches
//! `r` times as often. A **position** is a cut between layers. In a chain, position `p` is the cut before layer `p`,
//! and 0 is before all layers. In a branching model a position is a down-set of layers, and a stage is the difference
//! of two nested positions. A plan is a path from position 0 to the last one. Each step is a stage on some host set,
//! and no type is used more often than it has hosts. Every objective and constraint (throughput, latency, few hosts,
//! few bits lost, pins, links, quantized edges) is expressed by two functions of this path: the cost of a stage, and
//! the cost of a hop between two host sets (`cost`).
//!
//! `feasible_edges` keeps the stages and hops within a time limit. `dual_prices` proves that a limit can't be reached,
//! with dual prices on hosts. `labels` looks for a path within the host counts, guided and bounded by these prices.
//! `search` moves the limit until path and proof meet. `relaxed` bounds the plans of all cuts if these are too many to
//! search, and `shortage` explains why nothing fits.

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
    /// Index of the host type in [`Chain::types`].
    pub host_type: usize,
    /// Number of hosts of that type that share the stage.
    pub replicas: usize,
    /// Position before the stage. In a chain, its first layer, counted from 0.
    pub first: usize,
    /// Position behind the stage. In a chain, one more than its last layer.
    pub end: usize,
    /// Seconds that one host computes for one batch.
    pub compute_s: f64,
    /// Seconds between batches that the stage can sustain: compute time over replicas.
    pub interval_s: f64,
    /// Bytes that the stage needs on each of its hosts. The host must have more.
    pub memory_bytes: f64,
}

/// Data that crosses a position of a plan: into the first stage, between two stages, or out of the last stage.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct ChainHop {
    /// Bits per value: the first of [`Chain::bits`], unless the objective chose fewer.
    pub bits: u32,
    /// Bytes of one batch with that number of bits.
    pub bytes: f64,
    /// Seconds that one batch travels.
    pub seconds: f64,
    /// Seconds between batches that the hop can sustain.
    pub interval_s: f64,
}

/// A plan and its certificate.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct ChainPlan {
    /// Stages in the order of the layers.
    pub stages: Vec<ChainStage>,
    /// Hops, one more than stages: into the first stage, between neighbors, out of the last.
    pub hops: Vec<ChainHop>,
    /// Seconds between batches: the largest interval of all stages and hops.
    pub interval_s: f64,
    /// Seconds that one batch takes through an idle pipeline: the sum of all stages and hops.
    pub latency_s: f64,
    /// Value of the objective: interval, latency, number of hosts, or bits lost.
    pub value: f64,
    /// Lower bound on the value of every plan, with any cuts. Equal to `value`, up to 1e-9 of it, if the search ended
    /// by itself and covered all cuts.
    pub lower_bound: f64,
    /// Lower bound on the value of every plan with the cuts that were searched.
    pub searched_bound: f64,
    /// Whether all positions were searched. Otherwise only the positions in [`Chain::row`] were.
    pub has_all_positions: bool,
    /// Number of stages that the search evaluated.
    pub looked_at: u64,
}

/// Returns the best plan for `chain`.
///
/// `max_interval_s` is a constraint for every objective: no stage and no hop may take longer between batches. Equal
/// problems have equal answers, unless `control` stops the search. Then the answer is the best plan so far with its
/// bound.
///
/// # Errors
/// Returns [`Error::Argument`] or [`Error::Cluster`] for an invalid problem, [`Error::Infeasible`] that states what is
/// short and by how much, and [`Error::TimedOut`] or [`Error::Cancelled`] if it was stopped before the first plan.
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
    // In a branching model, a search along one line of nested cuts comes first. It is fast, and its plan bounds the
    // second search, over all cuts.
    let row = if chain.is_row() { None } else { Some(chain.along_row()) };
    let first = row.as_ref().unwrap_or(chain);
    if let Some(error) = shortage::certain(&Costs::without_stages(chain), max_interval_s) {
        return Err(error);
    }
    let costs = Costs::without_stages(first);
    let min = relaxed::bound(chain, objective, limit_s);
    let mut answer = search(&costs, None);
    let mut has_all_positions = chain.is_row();
    let reaches = |answer: &Answer| matches!(answer, Answer::Plan { value, .. } if *value <= min * (1.0 + 1e-9));
    // What can't be listed is as far from the answer as what there was no time for.
    // If there are too many stages to list, the search over all cuts is skipped, and only the relaxed bound covers
    // them.
    let whole = if chain.is_row() || reaches(&answer) { None } else { Costs::new(chain, control) };
    if let Some(whole) = &whole {
        let at = |step: &Step| Step { host_set: step.host_set, first: chain.row[step.first], end: chain.row[step.end] };
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
            let searched_bound = searched_bound.max(min).min(value);
            // A bound on the searched cuts says nothing about the other cuts.
            let lower_bound = if is_partial { min.min(value) } else { searched_bound };
            let mut plan = costs.describe(&path, objective, limit_s, value, lower_bound, looked_at);
            plan.searched_bound = searched_bound;
            plan.has_all_positions = has_all_positions || lower_bound >= value * (1.0 - 1e-9);
            // The plan of the first search numbers positions along the line, so translate them.
            if whole.is_none() && !chain.is_row() {
                for stage in &mut plan.stages {
                    (stage.first, stage.end) = (chain.row[stage.first], chain.row[stage.end]);
                }
            }
            Ok(plan)
        }
        Answer::Stopped => Err(match control.error() {
            Error::TimedOut { .. } => Error::TimedOut { known: at_least(objective, min) },
            interrupted => interrupted,
        }),
        Answer::Nothing => Err(shortage::explain(whole.as_ref().unwrap_or(&costs), max_interval_s, control)),
    }
}

/// Formats a lower bound on all plans as the end of the sentence that no plan was found.
fn at_least(objective: Objective, bound: f64) -> String {
    match objective {
        Objective::Throughput if bound > 0.0 => format!("; each takes at least {bound:.6} s between batches"),
        Objective::Latency if bound > 0.0 => format!("; each takes at least {bound:.6} s for a batch"),
        Objective::Hosts => format!("; each takes at least {bound:.0} of the hosts"),
        _ => String::new(),
    }
}
