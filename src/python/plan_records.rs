//! Conversion of planning problems and plans between Rust and Python's dataclasses and dicts.

use crate::cost::MemoryModel;
use crate::cost::network::{Cluster, Link, Node};
use crate::planner::hybrid::{Recompute, Settings, StageCost, WarmUp};
use pyo3::prelude::*;

/// Mirror of `hpgo.node.cluster.Cluster`.
#[derive(FromPyObject)]
pub(super) struct ClusterRecord {
    pub(super) nodes: Vec<NodeRecord>,
    pub(super) intra: Link,
    pub(super) inter: Link,
}

#[derive(FromPyObject)]
pub(super) struct NodeRecord {
    pub(super) device: DeviceRecord,
    pub(super) count: u32,
}

#[derive(FromPyObject)]
pub(super) struct DeviceRecord {
    pub(super) memory_bytes: f64,
    pub(super) speed: f64,
}

impl From<ClusterRecord> for Cluster {
    fn from(cluster: ClusterRecord) -> Self {
        let node = |node: NodeRecord| Node {
            devices: node.count,
            memory_bytes: node.device.memory_bytes,
            speed: node.device.speed,
            kind: 0,
        };
        Self { nodes: cluster.nodes.into_iter().map(node).collect(), intra: cluster.intra, inter: cluster.inter }
    }
}

/// Mirror of the fields of `hpgo.planning.problem.PlanningProblem` apart from model and cluster.
#[derive(FromPyObject)]
#[expect(clippy::struct_excessive_bools, reason = "they are the attributes of a Python record")]
pub(super) struct SettingsRecord {
    pub(super) global_batch_size: u32,
    pub(super) pipeline_micro_batch_sizes: Vec<u32>,
    pub(super) min_samples_per_replica: u32,
    pub(super) recompute: Vec<bool>,
    pub(super) recompute_by_stage: bool,
    pub(super) schedule: String,
    pub(super) even_split: bool,
    pub(super) shares_by_speed: bool,
    pub(super) overlap: bool,
    pub(super) overlap_p2p_comm: bool,
    pub(super) memory: MemoryModel,
    pub(super) max_stages: u32,
    pub(super) max_replicas: u32,
    pub(super) equal_replicas: bool,
    pub(super) needs_full_ranks: bool,
    pub(super) has_single_wave: bool,
}

impl SettingsRecord {
    /// Converts the record. Schedules without a choice of warm-up get the warm-up of 1F1B.
    pub(super) fn settings(self) -> Settings {
        Settings {
            // `planner::action_lists` plans the other schedules and uses each schedule's own warm-up instead.
            warm_up: match self.schedule.as_str() {
                "gpipe" => WarmUp::All,
                "eager_1f1b" => WarmUp::Eager,
                _ => WarmUp::Min,
            },
            global_batch: self.global_batch_size,
            pipeline_micro_batch_sizes: self.pipeline_micro_batch_sizes,
            min_samples_per_replica: self.min_samples_per_replica,
            uneven_shares: !self.even_split,
            shares_by_speed: self.shares_by_speed,
            overlap_sync: self.overlap,
            overlap_p2p_comm: self.overlap_p2p_comm,
            recompute: recompute_choices(&self.recompute, self.recompute_by_stage),
            memory: self.memory,
            max_stages: self.max_stages,
            max_replicas: self.max_replicas,
            equal_replicas: self.equal_replicas,
        }
    }
}

/// Returns the choices for these values of recomputation, of each stage or of all stages together.
pub(super) fn recompute_choices(values: &[bool], is_by_stage: bool) -> Vec<Recompute> {
    if is_by_stage && values.contains(&false) && values.contains(&true) {
        return vec![Recompute::ByStage];
    }
    values.iter().map(|&value| Recompute::uniform(value)).collect()
}

/// One stage of a plan, with its costs.
#[derive(IntoPyObject)]
pub(super) struct StageRecord {
    pub(super) layers: Vec<usize>,
    pub(super) devices: Vec<u32>,
    pub(super) max_in_flight: u32,
    pub(super) cost: StageCost,
}

/// A plan with its costs.
#[derive(IntoPyObject)]
pub(super) struct PlanRecord {
    pub(super) pipeline_micro_batch_size: u32,
    pub(super) step_s: f64,
    pub(super) stages: Vec<StageRecord>,
    /// Virtual stages per device.
    pub(super) virtual_stages_per_rank: usize,
    /// Actions of each rank. `None` if they follow from the micro-batches in flight.
    pub(super) actions: Option<Vec<String>>,
}

// PyO3 copies the attributes by name, so the fields here have the names of the Python dataclasses.
/// Results of a search apart from the plan. `lower_bound_s` is `None` if no bound is known.
#[derive(IntoPyObject, Default)]
pub(super) struct SearchRecord {
    pub(super) lower_bound_s: Option<f64>,
    pub(super) searched_cuts_bound_s: Option<f64>,
    pub(super) node_aligned_bound_s: Option<f64>,
    /// Reason why only some cuts were searched. `None` if all were.
    pub(super) one_order: Option<String>,
    /// Whether only node-aligned placements were searched.
    pub(super) is_node_aligned: bool,
    pub(super) stop_reason: Option<&'static str>,
    pub(super) explored_labels: u64,
    pub(super) simulated: u64,
    /// Whether the plan has shares by speed.
    pub(super) shares_by_speed: bool,
}

/// Result of a search for one schedule: a plan, which may need more memory than there is, or a message that explains
/// why there is none.
#[derive(IntoPyObject)]
pub(super) struct TriedRecord {
    pub(super) schedule: String,
    pub(super) plan: Option<PlanRecord>,
    pub(super) search: SearchRecord,
    pub(super) message: Option<String>,
    pub(super) hint: Option<String>,
}

/// Baseline plans: data parallelism, and pipeline parallelism only. `None` where there is none.
#[derive(IntoPyObject)]
pub(super) struct ClassicsRecord {
    pub(super) data_parallel: Option<PlanRecord>,
    pub(super) pipeline_only: Option<PlanRecord>,
    /// Reason why the search for the second plan stopped early, so that a better one may exist.
    pub(super) pipeline_only_stopped: Option<&'static str>,
}
