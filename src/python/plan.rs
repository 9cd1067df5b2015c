//! The planner for Python.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyModule;

use super::{records, to_py_err, watched};
use crate::cluster::{Cluster, Link, Machine};
use crate::control::Control;
use crate::cost::{MemoryModel, Model};
use crate::error::Error;
use crate::planner::hybrid::{self, Candidate, Priced, Pricer, Settings, StagePrice, WarmUp};
use crate::states::{Cuts, DEFAULT_BOUND, States};

/// `hpgo.cluster.Cluster`.
#[derive(FromPyObject)]
struct ClusterRecord {
    machines: Vec<MachineRecord>,
    intra: LinkRecord,
    inter: LinkRecord,
}

#[derive(FromPyObject)]
struct MachineRecord {
    device: DeviceRecord,
    count: u32,
}

#[derive(FromPyObject)]
struct DeviceRecord {
    memory_bytes: f64,
    speed: f64,
}

#[derive(FromPyObject)]
struct LinkRecord {
    bytes_per_s: f64,
    collective_bytes_per_s: f64,
    latency_s: f64,
}

impl From<LinkRecord> for Link {
    fn from(link: LinkRecord) -> Self {
        let LinkRecord { bytes_per_s, collective_bytes_per_s, latency_s } = link;
        Self { bytes_per_s, collective_bytes_per_s, latency_s }
    }
}

impl From<ClusterRecord> for Cluster {
    fn from(cluster: ClusterRecord) -> Self {
        let machine = |machine: MachineRecord| Machine {
            devices: machine.count,
            memory_bytes: machine.device.memory_bytes,
            speed: machine.device.speed,
        };
        Self {
            machines: cluster.machines.into_iter().map(machine).collect(),
            intra: cluster.intra.into(),
            inter: cluster.inter.into(),
        }
    }
}

/// `hpgo.plans.Settings`.
#[derive(FromPyObject)]
struct SettingsRecord {
    global_batch_size: u32,
    micro_batch_sizes: Vec<u32>,
    smallest_share: u32,
    uneven_shares: bool,
    overlap_sync: bool,
    recompute: Vec<bool>,
    schedule: String,
    gradients_per_weight: f64,
    optimizer_per_weight: f64,
    shard_optimizer: bool,
    reserved_bytes: f64,
    most_stages: u32,
    most_replicas: u32,
}

impl From<SettingsRecord> for Settings {
    fn from(record: SettingsRecord) -> Self {
        Self {
            global_batch: record.global_batch_size,
            micro_batches: record.micro_batch_sizes,
            smallest_share: record.smallest_share,
            uneven_shares: record.uneven_shares,
            overlap_sync: record.overlap_sync,
            recompute: record.recompute,
            warm_up: match record.schedule.as_str() {
                "gpipe" => WarmUp::All,
                "1f1b" => WarmUp::Least,
                _ => WarmUp::Eager,
            },
            memory: MemoryModel {
                gradients_per_weight: record.gradients_per_weight,
                optimizer_per_weight: record.optimizer_per_weight,
                shard_optimizer: record.shard_optimizer,
                reserved_bytes: record.reserved_bytes,
            },
            most_stages: record.most_stages,
            most_replicas: record.most_replicas,
        }
    }
}

/// One stage of an answer.
#[derive(IntoPyObject)]
struct StageRecord {
    layers: Vec<usize>,
    devices: Vec<u32>,
    window: u32,
    price: StagePrice,
}

/// A plan with its price.
#[derive(IntoPyObject)]
struct PlanRecord {
    micro_batch_size: u32,
    recompute: bool,
    step_s: f64,
    path_s: f64,
    stages: Vec<StageRecord>,
}

/// What the search says beyond the plan.
#[derive(IntoPyObject)]
struct SearchRecord {
    lower_bound_s: f64,
    exact_placement: bool,
    one_order: Option<String>,
    finished: bool,
    labels: u64,
    simulated: u64,
    data_parallel: Option<PlanRecord>,
    straight: Option<PlanRecord>,
}

fn plan_record(states: &States, cluster: &Cluster, plan: &Candidate, priced: Priced) -> PlanRecord {
    let stages = (plan.stages.iter().zip(priced.stages).zip(plan.devices(cluster)))
        .map(|((stage, price), devices)| StageRecord {
            layers: states.layers_between(stage.begin, stage.end),
            devices,
            window: stage.window,
            price,
        })
        .collect();
    PlanRecord {
        micro_batch_size: plan.micro_batch,
        recompute: plan.recompute,
        step_s: priced.step_s,
        path_s: priced.path_s,
        stages,
    }
}

fn control(deadline_s: Option<f64>) -> Control {
    Control::with_deadline(deadline_s.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)))
}

/// The best plan, what is known about it, and the plans that people try first.
#[pyfunction]
fn plan(
    py: Python<'_>,
    profile: &Bound<'_, PyAny>,
    cluster: ClusterRecord,
    settings: SettingsRecord,
    deadline_s: Option<f64>,
    progress: Option<Py<PyAny>>,
) -> PyResult<(PlanRecord, SearchRecord)> {
    let graph = records::graph(profile)?;
    let (cluster, settings) = (Cluster::from(cluster), Settings::from(settings));
    let control = control(deadline_s);
    watched(py, &control, progress.as_ref(), true, || {
        let states = States::of(&graph, DEFAULT_BOUND)?;
        let model = Model::new(&graph, &states);
        let answer = hybrid::plan(&model, &cluster, &settings, &control)?;
        let record = |(plan, priced): (Candidate, Priced)| plan_record(&states, &cluster, &plan, priced);
        let straight = match hybrid::straight(&model, &cluster, &settings, &control) {
            Ok(answer) => Some((answer.plan, answer.priced)),
            Err(Error::Infeasible { .. } | Error::Cancelled) => None,
            Err(other) => return Err(other),
        };
        let search = SearchRecord {
            lower_bound_s: answer.lower_bound_s,
            exact_placement: answer.exact_placement,
            one_order: match states.cuts() {
                Cuts::Exact => None,
                Cuts::LinearOrder { why } => Some(why.clone()),
            },
            finished: answer.finished,
            labels: answer.labels,
            simulated: answer.simulated,
            data_parallel: hybrid::data_parallel(&model, &cluster, &settings).map(record),
            straight: straight.map(record),
        };
        Ok((record((answer.plan, answer.priced)), search))
    })
}

/// The plan that comes closest to fitting the devices' memory.
#[pyfunction]
fn closest_plan(
    py: Python<'_>,
    profile: &Bound<'_, PyAny>,
    cluster: ClusterRecord,
    settings: SettingsRecord,
    deadline_s: Option<f64>,
) -> PyResult<PlanRecord> {
    let graph = records::graph(profile)?;
    let (cluster, settings) = (Cluster::from(cluster), Settings::from(settings));
    let control = control(deadline_s);
    watched(py, &control, None, false, || {
        let states = States::of(&graph, DEFAULT_BOUND)?;
        let model = Model::new(&graph, &states);
        let answer = hybrid::closest(&model, &cluster, &settings, &control)?;
        // Priced again, against the memory that there is.
        let priced = Pricer::new(&model, &cluster, &settings).price(&answer.plan)?;
        Ok(plan_record(&states, &cluster, &answer.plan, priced))
    })
}

/// Whether some plan fits the devices' memory; not known to fit when the deadline passes.
#[pyfunction]
fn fits(
    py: Python<'_>,
    profile: &Bound<'_, PyAny>,
    cluster: ClusterRecord,
    settings: SettingsRecord,
    deadline_s: Option<f64>,
) -> PyResult<bool> {
    let graph = records::graph(profile)?;
    let (cluster, settings) = (Cluster::from(cluster), Settings::from(settings));
    let control = control(deadline_s);
    watched(py, &control, None, false, || {
        let states = States::of(&graph, DEFAULT_BOUND)?;
        let model = Model::new(&graph, &states);
        match hybrid::fitting(&model, &cluster, &settings, &control) {
            Ok(_) => Ok(true),
            Err(Error::Infeasible { .. } | Error::Cancelled) => Ok(false),
            Err(other) => Err(other),
        }
    })
}

/// The best of all plans of a small question, each simulated, and how many there are.
#[pyfunction]
fn exhaustive(
    py: Python<'_>,
    profile: &Bound<'_, PyAny>,
    cluster: ClusterRecord,
    settings: SettingsRecord,
) -> PyResult<(PlanRecord, u64)> {
    let graph = records::graph(profile)?;
    let (cluster, settings) = (Cluster::from(cluster), Settings::from(settings));
    let control = control(None);
    watched(py, &control, None, false, || {
        let states = States::of(&graph, DEFAULT_BOUND)?;
        let model = Model::new(&graph, &states);
        let (plan, priced, plans) = hybrid::exhaustive(&model, &cluster, &settings, &control)?;
        Ok((plan_record(&states, &cluster, &plan, priced), plans))
    })
}

/// The price of a plan given as layers and devices of each stage.
#[pyfunction]
fn evaluate(
    py: Python<'_>,
    profile: &Bound<'_, PyAny>,
    cluster: ClusterRecord,
    settings: SettingsRecord,
    stages: Vec<(Vec<usize>, Vec<u32>)>,
) -> PyResult<PlanRecord> {
    let graph = records::graph(profile)?;
    let (cluster, settings) = (Cluster::from(cluster), Settings::from(settings));
    let priced = py.detach(|| {
        let (layers, devices): (Vec<_>, Vec<_>) = stages.into_iter().unzip();
        let states = States::between(&graph, &layers)?;
        let model = Model::new(&graph, &states);
        let (plan, priced) = hybrid::evaluate(&model, &cluster, &settings, &devices)?;
        Ok(plan_record(&states, &cluster, &plan, priced))
    });
    priced.map_err(|error| to_py_err(py, &error))
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(plan, module)?)?;
    module.add_function(wrap_pyfunction!(closest_plan, module)?)?;
    module.add_function(wrap_pyfunction!(fits, module)?)?;
    module.add_function(wrap_pyfunction!(exhaustive, module)?)?;
    module.add_function(wrap_pyfunction!(evaluate, module)?)
}
