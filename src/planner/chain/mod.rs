//! Uneven hosts in a row: who takes which slice of a chain of layers, so that the slowest stage or transfer is short.
//!
//! A **crew** is one or more hosts of one type that share a stage; each takes its turn, so `r` hosts pass a batch on `r`
//! times as often. A **position** is a cut between layers: position `p` lies before layer `p`, 0 before all of them. A
//! plan is a path from position 0 to the last one, each step a stage of some crew, that uses no type more often than it
//! has hosts. Everything that is asked (throughput, latency, few hosts, few bits lost; pins, links, quantised edges) is
//! expressed in two functions of this path: what a stage costs and what a hop between two crews costs (`cost`).
//!
//! `roads` keeps the stages and hops that are within a time limit; `host_prices` proves that a limit is out of reach by
//! putting a price on hosts; `labels` looks for a path within host counts, guided and bounded by those prices;
//! `search` moves the limit until path and proof meet. `shortage` says what is missing where nothing fits.

mod cost;
mod host_prices;
mod labels;
mod question;
mod roads;
mod search;
mod shortage;

pub use question::{Chain, Hop, HostType, Objective};

use crate::control::Control;
use crate::error::Error;
use cost::Costs;
use search::Answer;

/// One stage of a plan. Times are for one batch.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct ChainStage {
    /// Index into [`Chain::types`].
    pub host_type: usize,
    /// Hosts of that type that share the stage.
    pub replicas: usize,
    /// First layer, from 0.
    pub first: usize,
    /// One behind the last layer.
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
    /// No plan has a smaller value. Equal to `value` up to 1e-9 of it when the search came to its end.
    pub lower_bound: f64,
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
    let costs = Costs::new(chain);
    let limit_s = search::rounded_up(max_interval_s.unwrap_or(f64::MAX));
    let found = match objective {
        Objective::Throughput => search::fastest(&costs, limit_s, control),
        _ => search::cheapest(&costs, objective, limit_s, control),
    };
    match found {
        Answer::Plan { path, value, lower_bound, looked_at } => {
            Ok(costs.describe(&path, objective, limit_s, value, lower_bound, looked_at))
        }
        Answer::Stopped => Err(control.error()),
        Answer::Nothing => Err(shortage::explain(chain, max_interval_s, control)),
    }
}
