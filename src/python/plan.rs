//! The planner for Python.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyModule;

use super::records::ProfileRecord;
use super::schedule::{Built, Columns, Record};
use super::{to_py_err, watched};
use crate::control::{Control, Stopped};
use crate::cost::network::{Cluster, Link, Machine};
use crate::cost::{MemoryModel, Model};
use crate::error::{Error, Result};
use crate::model::graph::Graph;
use crate::model::lineage::Lineage;
use crate::model::states::{Cuts, States};
use crate::planner::chunked;
use crate::planner::hybrid::{self, Candidate, Priced, Schedules, Settings, StagePrice, WarmUp};

/// `hpgo.machine.cluster.Cluster`.
#[derive(FromPyObject)]
struct ClusterRecord {
    machines: Vec<MachineRecord>,
    intra: Link,
    inter: Link,
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

impl From<ClusterRecord> for Cluster {
    fn from(cluster: ClusterRecord) -> Self {
        let machine = |machine: MachineRecord| Machine {
            devices: machine.count,
            memory_bytes: machine.device.memory_bytes,
            speed: machine.device.speed,
        };
        Self {
            machines: cluster.machines.into_iter().map(machine).collect(),
            intra: cluster.intra,
            inter: cluster.inter,
        }
    }
}

/// `hpgo.planning.question.Question`.
#[derive(FromPyObject)]
struct QuestionRecord {
    profile: ProfileRecord,
    cluster: ClusterRecord,
    global_batch_size: u32,
    micro_batch_sizes: Vec<u32>,
    smallest_share: u32,
    recompute: Vec<bool>,
    schedule: String,
    equal_shares: bool,
    overlap: bool,
    memory: MemoryModel,
    most_stages: u32,
    most_replicas: u32,
    equal_replicas: bool,
    stage_ends: Option<Vec<Vec<usize>>>,
    some_stage_ends: Option<String>,
}

impl QuestionRecord {
    fn split(self) -> Result<(Graph, Cluster, Settings)> {
        let settings = Settings {
            global_batch: self.global_batch_size,
            micro_batch_sizes: self.micro_batch_sizes,
            smallest_share: self.smallest_share,
            uneven_shares: !self.equal_shares,
            overlap_sync: self.overlap,
            recompute: self.recompute,
            warm_up: match self.schedule.as_str() {
                "gpipe" => WarmUp::All,
                "1f1b" => WarmUp::Least,
                "eager_1f1b" => WarmUp::Eager,
                other => {
                    return Err(Error::argument(
                        format!("no search knows schedule `{other}`"),
                        "choose `1f1b`, `eager_1f1b` or `gpipe`",
                    ));
                }
            },
            memory: self.memory,
            most_stages: self.most_stages,
            most_replicas: self.most_replicas,
            equal_replicas: self.equal_replicas,
        };
        Ok((self.profile.try_into()?, self.cluster.into(), settings))
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
    searched_cuts_bound_s: Option<f64>,
    compact_bound_s: Option<f64>,
    one_order: Option<String>,
    stopped: Option<&'static str>,
    labels: u64,
    simulated: u64,
}

/// What the search for plans with several stages a device says beyond the plan.
#[derive(IntoPyObject)]
struct ChunkedRecord {
    lower_bound_s: f64,
    one_order: Option<String>,
    stopped: Option<&'static str>,
    simulated: u64,
}

/// The plans that people try first, where there are any.
#[derive(IntoPyObject)]
struct ClassicsRecord {
    data_parallel: Option<PlanRecord>,
    straight: Option<PlanRecord>,
    /// Why there may be a straight pipeline where none was found, or a better one.
    straight_stopped: Option<&'static str>,
}

fn name_of(stopped: Stopped) -> &'static str {
    match stopped {
        Stopped::Deadline => "deadline",
        Stopped::Interrupt => "interrupt",
        Stopped::Effort => "effort",
    }
}

/// A question with everything that answers it needs.
struct Asked<'a> {
    states: &'a States,
    model: &'a Model,
    cluster: &'a Cluster,
    settings: &'a Settings,
    control: &'a Control,
}

impl Asked<'_> {
    fn record(&self, (plan, priced): (Candidate, Priced)) -> PlanRecord {
        let stages = (plan.stages.iter().zip(priced.stages).zip(plan.devices(self.cluster)))
            .map(|((stage, price), devices)| StageRecord {
                layers: self.states.layers_between(stage.begin, stage.end),
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
}

/// What `work` makes of a question; it is [`watched`].
fn answer<T: Send>(
    py: Python<'_>,
    question: QuestionRecord,
    deadline_s: Option<f64>,
    progress: Option<&Py<PyAny>>,
    keep_partial: bool,
    work: impl FnOnce(&Asked<'_>) -> Result<T> + Send,
) -> PyResult<T> {
    let has_no_time = deadline_s == Some(0.0);
    let cuts = move |graph: &Graph, _: &Cluster, _: &Settings, control: &Control| {
        // Without any time there is no search, but what a single stage takes is still answered.
        if has_no_time { one_stage(graph) } else { States::for_plans(graph, control) }
    };
    answer_at(py, question, deadline_s, progress, keep_partial, cuts, work)
}

/// No cuts but both ends.
fn one_stage(graph: &Graph) -> Result<States> {
    States::between(graph, &[(0..graph.layers.len()).collect()])
}

/// The same at the cuts that `cuts` finds, unless the question names them.
fn answer_at<T: Send>(
    py: Python<'_>,
    mut question: QuestionRecord,
    deadline_s: Option<f64>,
    progress: Option<&Py<PyAny>>,
    keep_partial: bool,
    cuts: impl FnOnce(&Graph, &Cluster, &Settings, &Control) -> Result<States> + Send,
    work: impl FnOnce(&Asked<'_>) -> Result<T> + Send,
) -> PyResult<T> {
    let deadline = deadline_s.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
    let control = Control::with_deadline(deadline);
    watched(py, &control, progress, keep_partial, || {
        let (stage_ends, some_stage_ends) = (question.stage_ends.take(), question.some_stage_ends.take());
        let (graph, cluster, settings) = question.split()?;
        let states = match stage_ends {
            None => cuts(&graph, &cluster, &settings, &control)?,
            Some(ends) => States::ending_at(&graph, &ends, some_stage_ends)?,
        };
        let model = Model::new(&graph, &states);
        work(&Asked { states: &states, model: &model, cluster: &cluster, settings: &settings, control: &control })
    })
}

/// Whether it is certain that no plan fits without listing the cuts of a branching model, which takes longer than this.
fn fits_nowhere(
    graph: &Graph,
    cluster: &Cluster,
    settings: &Settings,
    schedules: Schedules,
    control: &Control,
) -> Result<bool> {
    let (model, lineage) = (Model::new(graph, &one_stage(graph)?), Lineage::of(graph)?);
    hybrid::nothing_fits_with_any_cuts(&model, lineage.as_ref(), cluster, settings, schedules, control)
}

/// The best plan, and what is known about it.
#[pyfunction]
fn plan(
    py: Python<'_>,
    question: QuestionRecord,
    deadline_s: Option<f64>,
    progress: Option<Py<PyAny>>,
) -> PyResult<(PlanRecord, SearchRecord)> {
    let cuts = |graph: &Graph, cluster: &Cluster, settings: &Settings, control: &Control| {
        if fits_nowhere(graph, cluster, settings, Schedules::OF_SETTINGS, control)? {
            return Err(hybrid::no_plan_fits());
        }
        States::for_plans(graph, control)
    };
    answer_at(py, question, deadline_s, progress.as_ref(), true, cuts, |asked| {
        let &Asked { states, model, cluster, settings, control } = asked;
        let answer = hybrid::plan(model, cluster, settings, control)?;
        let search = SearchRecord {
            lower_bound_s: answer.lower_bound_s,
            searched_cuts_bound_s: answer.searched_cuts_bound_s,
            compact_bound_s: answer.compact_bound_s,
            one_order: match states.cuts() {
                Cuts::Exact => None,
                Cuts::Fewer { why } | Cuts::LinearOrder { why } => Some(why.clone()),
            },
            stopped: answer.stopped.map(name_of),
            labels: answer.labels,
            simulated: answer.simulated,
        };
        Ok((asked.record((answer.plan, answer.priced)), search))
    })
}

/// The plans that people try first; a short search, and none of its findings if it was interrupted.
#[pyfunction]
fn classic_plans(py: Python<'_>, question: QuestionRecord, deadline_s: Option<f64>) -> PyResult<ClassicsRecord> {
    answer(py, question, deadline_s, None, false, |asked| {
        let &Asked { model, cluster, settings, control, .. } = asked;
        let straight = hybrid::straight(model, cluster, settings, control)?;
        Ok(ClassicsRecord {
            data_parallel: hybrid::data_parallel(model, cluster, settings).map(|found| asked.record(found)),
            straight: straight.plan.map(|found| asked.record(found)),
            straight_stopped: straight.stopped.map(name_of),
        })
    })
}

/// The plan that comes closest to fitting the devices' memory.
#[pyfunction]
fn closest_plan(py: Python<'_>, question: QuestionRecord, deadline_s: Option<f64>) -> PyResult<PlanRecord> {
    answer(py, question, deadline_s, None, false, |asked| {
        let &Asked { model, cluster, settings, control, .. } = asked;
        Ok(asked.record(hybrid::closest(model, cluster, settings, control)?))
    })
}

/// The plan that comes closest to fitting the devices' memory, if one is found in time, and which changes of
/// `hybrid::helpful_changes` let some plan fit. For questions of which it is certain that no plan fits.
#[pyfunction]
fn shortage(
    py: Python<'_>,
    question: QuestionRecord,
    deadline_s: Option<f64>,
) -> PyResult<(Option<PlanRecord>, Vec<bool>)> {
    // One order of the layers explains a shortage as well as all cuts, and takes a fraction of the time.
    let cuts = |graph: &Graph, _: &Cluster, _: &Settings, _: &Control| States::of(graph, 0);
    answer_at(py, question, None, None, false, cuts, |asked| {
        let &Asked { model, cluster, settings, control, .. } = asked;
        let soon = Control::with_deadline(
            deadline_s.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)),
        );
        let closest = hybrid::closest(model, cluster, settings, &soon).ok();
        let helps = hybrid::helpful_changes(model, cluster, settings, control)?;
        Ok((closest.map(|found| asked.record(found)), helps))
    })
}

/// Whether some plan fits the devices' memory; not known to fit when the deadline passes.
#[pyfunction]
fn fits(py: Python<'_>, question: QuestionRecord, deadline_s: Option<f64>) -> PyResult<bool> {
    answer(py, question, deadline_s, None, false, |&Asked { model, cluster, settings, control, .. }| {
        match hybrid::fitting(model, cluster, settings, control) {
            Ok(_) => Ok(true),
            Err(Error::Infeasible { .. } | Error::TimedOut { .. } | Error::Cancelled) => Ok(false),
            Err(other) => Err(other),
        }
    })
}

/// Whether it is certain that no plan fits the devices' memory under some schedules, as `hybrid::nothing_fits` says.
#[pyfunction]
fn nothing_fits(
    py: Python<'_>,
    question: QuestionRecord,
    warms_up: bool,
    one_stage_a_device: bool,
    deadline_s: Option<f64>,
) -> PyResult<bool> {
    let schedules = Schedules { warms_up, one_stage_a_device };
    let cuts = |graph: &Graph, cluster: &Cluster, settings: &Settings, control: &Control| {
        // Several stages on a device have conditions on layers only. If no plan fits, nor does that of a single stage.
        let needs_no_cuts = !one_stage_a_device || fits_nowhere(graph, cluster, settings, schedules, control)?;
        if needs_no_cuts { one_stage(graph) } else { States::for_plans(graph, control) }
    };
    answer_at(py, question, deadline_s, None, false, cuts, |&Asked { model, cluster, settings, control, .. }| {
        hybrid::nothing_fits(model, cluster, settings, schedules, control)
    })
}

/// The best plan that a quick search finds, without a proof; the same one on every machine, if there is no deadline.
#[pyfunction]
fn quick_plan(py: Python<'_>, question: QuestionRecord, deadline_s: Option<f64>) -> PyResult<PlanRecord> {
    answer(py, question, deadline_s, None, false, |asked| {
        let &Asked { model, cluster, settings, control, .. } = asked;
        let found = hybrid::fitting(model, cluster, settings, control)?;
        Ok(asked.record((found.plan, found.priced)))
    })
}

/// The best of all plans of a small question, each simulated, and how many there are.
#[pyfunction]
fn exhaustive(py: Python<'_>, question: QuestionRecord) -> PyResult<(PlanRecord, u64)> {
    answer(py, question, None, None, false, |asked| {
        let (plan, priced, plans) = hybrid::exhaustive(asked.model, asked.cluster, asked.settings, asked.control)?;
        Ok((asked.record((plan, priced)), plans))
    })
}

/// The price of a plan given as layers and devices of each stage; its warm-up windows are chosen, unless they are given.
#[pyfunction]
#[pyo3(signature = (question, stages, windows=None))]
fn evaluate(
    py: Python<'_>,
    question: QuestionRecord,
    stages: Vec<(Vec<usize>, Vec<u32>)>,
    windows: Option<Vec<u32>>,
) -> PyResult<PlanRecord> {
    let priced = py.detach(|| {
        let (layers, devices): (Vec<_>, Vec<_>) = stages.into_iter().unzip();
        let (graph, cluster, settings) = question.split()?;
        let states = States::between(&graph, &layers)?;
        let model = Model::new(&graph, &states);
        let control = Control::default();
        let asked = Asked { states: &states, model: &model, cluster: &cluster, settings: &settings, control: &control };
        Ok(asked.record(match windows {
            None => hybrid::evaluate(&model, &cluster, &settings, &devices)?,
            Some(windows) => hybrid::reprice(&model, &cluster, &settings, &devices, &windows)?,
        }))
    });
    priced.map_err(|error| to_py_err(py, &error))
}

/// The best plan found that runs `chunks` stages on each device by the schedule `name`, with micro-batches of `sizes`, and
/// its orders; one that doesn't fit if none was found that does.
#[pyfunction]
fn chunked_plan<'py>(
    py: Python<'py>,
    question: QuestionRecord,
    name: &str,
    chunks: Vec<u32>,
    sizes: Vec<u32>,
    deadline_s: Option<f64>,
    progress: Option<Py<PyAny>>,
) -> PyResult<(PlanRecord, Built<'py>, ChunkedRecord)> {
    let (plan, orders, facts) = answer(py, question, deadline_s, progress.as_ref(), true, |asked| {
        let &Asked { states, model, cluster, settings, control } = asked;
        let answer = chunked::plan(model, cluster, settings, name, &chunks, &sizes, control)?;
        let facts = ChunkedRecord {
            lower_bound_s: answer.lower_bound_s,
            one_order: match states.cuts() {
                Cuts::Exact if answer.all_cuts => None,
                Cuts::Exact => Some("each cut holds all before it".to_owned()),
                Cuts::Fewer { why } | Cuts::LinearOrder { why } => Some(why.clone()),
            },
            stopped: answer.stopped.map(name_of),
            simulated: answer.simulated,
        };
        let chunked::Found { micro_batch, recompute, cuts, devices, orders, run } = answer.plan;
        let layers = cuts.windows(2).map(|ends| states.layers_between(ends[0], ends[1])).collect();
        let columns = Columns::of(orders, &Control::default())?; // also of a search that was stopped
        Ok((run_record(micro_batch, recompute, layers, devices, run), columns, facts))
    })?;
    Ok((plan, orders.into_python(py), facts))
}

/// The price of stages that are run in these orders, several of them on each device.
#[pyfunction]
fn evaluate_orders(
    py: Python<'_>,
    question: QuestionRecord,
    stages: Vec<(Vec<usize>, Vec<u32>)>,
    orders: Record<'_>,
) -> PyResult<PlanRecord> {
    let orders = orders.to_schedule();
    let priced = py.detach(|| {
        let (layers, devices): (Vec<_>, Vec<_>) = stages.into_iter().unzip();
        let (orders, is_checked) = orders?;
        if !is_checked {
            orders.validate()?;
        }
        let (graph, cluster, settings) = question.split()?;
        let states = States::between(&graph, &layers)?;
        let model = Model::new(&graph, &states);
        let (micro_batch, recompute, run) = chunked::evaluate(&model, &cluster, &settings, &devices, &orders)?;
        // The price is that of the model's own order, so this is the order to list.
        let layers = (0..devices.len()).map(|stage| states.layers_between(stage, stage + 1)).collect();
        Ok(run_record(micro_batch, recompute, layers, devices, run))
    });
    priced.map_err(|error| to_py_err(py, &error))
}

fn run_record(
    micro_batch_size: u32,
    recompute: bool,
    layers: Vec<Vec<usize>>,
    devices: Vec<Vec<u32>>,
    run: chunked::Run,
) -> PlanRecord {
    let stages = (layers.into_iter().zip(devices).zip(run.stages.into_iter().zip(run.in_flight)))
        .map(|((layers, devices), (price, window))| StageRecord { layers, devices, window, price })
        .collect();
    PlanRecord { micro_batch_size, recompute, step_s: run.step_s, path_s: run.step_s, stages }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(plan, module)?)?;
    module.add_function(wrap_pyfunction!(classic_plans, module)?)?;
    module.add_function(wrap_pyfunction!(closest_plan, module)?)?;
    module.add_function(wrap_pyfunction!(shortage, module)?)?;
    module.add_function(wrap_pyfunction!(fits, module)?)?;
    module.add_function(wrap_pyfunction!(nothing_fits, module)?)?;
    module.add_function(wrap_pyfunction!(quick_plan, module)?)?;
    module.add_function(wrap_pyfunction!(exhaustive, module)?)?;
    module.add_function(wrap_pyfunction!(chunked_plan, module)?)?;
    module.add_function(wrap_pyfunction!(evaluate_orders, module)?)?;
    module.add_function(wrap_pyfunction!(evaluate, module)?)
}
