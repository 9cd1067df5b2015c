//! Python bindings of the original HPGO planner.

use pyo3::prelude::*;
use pyo3::types::PyModule;

use super::{records, to_py_err, watched};
use crate::control::Control;
use crate::error::Error;
use crate::planner::legacy::{Devices, Model, Plan, Stage, State, columns, plans};

/// A stage: first state, end, replicas, devices.
type StageTuple = (usize, usize, u32, Vec<u32>);

/// A state: description, then compute seconds and the bytes of activation, output activation and parameters up to it.
type StateTuple = (String, f64, f64, f64, f64);

fn raised(py: Python<'_>) -> impl Fn(Error) -> PyErr {
    move |error| to_py_err(py, &error)
}

fn known(devices: &Devices, named: &[u32]) -> Result<(), Error> {
    match named.iter().find(|&&device| device >= devices.count()) {
        Some(device) => Err(Error::argument(
            format!("device {device} is not among the {} devices of seps", devices.count()),
            format!("choose devices from 0 to {}", devices.count().saturating_sub(1)),
        )),
        None if named.is_empty() => {
            Err(Error::argument("no device is given", "name at least one device, for instance [0]"))
        }
        None => Ok(()),
    }
}

/// Returns speed-up, stages and the number of parallel pipelines of the best plan of each kind.
#[pyfunction]
fn legacy_plans(
    py: Python<'_>,
    profile: &Bound<'_, PyAny>,
    seps: Vec<u32>,
    global_batch_size: u32,
    min_micro_batch_size: u32,
) -> PyResult<Vec<(f64, Vec<StageTuple>, u32)>> {
    let graph = records::graph(profile)?;
    let control = Control::default();
    let found = watched(py, &control, None, false, || {
        plans(&Model::of(&graph, global_batch_size)?, &Devices::new(&seps)?, min_micro_batch_size, &control)
    })?;
    let stage = |Stage { start, end, replicas, devices }| (start, end, replicas, devices);
    let plan = |Plan { speedup, stages, replicas }| (speedup, stages.into_iter().map(stage).collect(), replicas);
    Ok(found.into_iter().map(plan).collect())
}

/// Returns the original's states, with sums up to each, at the global batch size.
#[pyfunction]
fn legacy_states(py: Python<'_>, profile: &Bound<'_, PyAny>, global_batch_size: u32) -> PyResult<Vec<StateTuple>> {
    let graph = records::graph(profile)?;
    let model = py.detach(|| Model::of(&graph, global_batch_size)).map_err(raised(py))?;
    let row = |state: State| {
        let State { description, compute_s, activation_bytes, output_activation_bytes, parameter_bytes } = state;
        (description, compute_s, activation_bytes, output_activation_bytes, parameter_bytes)
    };
    Ok(model.states.into_iter().map(row).collect())
}

/// Returns the indices of the layers of each stage, for stages that end with the given states.
#[pyfunction]
fn legacy_stage_layers(py: Python<'_>, profile: &Bound<'_, PyAny>, last: Vec<usize>) -> PyResult<Vec<Vec<usize>>> {
    let graph = records::graph(profile)?;
    // The layers of a state do not depend on the batch size, so any size gives the same answer.
    let model = Model::of(&graph, 1).map_err(raised(py))?;
    if let Some(state) = last.iter().find(|&&state| state >= model.states.len()) {
        let message = format!("state is {state}, but the model has {} states", model.states.len());
        return Err(to_py_err(
            py,
            &Error::argument(message, format!("choose states from 0 to {}", model.states.len().saturating_sub(1))),
        ));
    }
    Ok(model.stage_layers(&graph, &last))
}

/// Returns the speed-ups of data parallelism without overlap, with P3, and with plain overlap.
#[pyfunction]
fn legacy_columns(
    py: Python<'_>,
    profile: &Bound<'_, PyAny>,
    seps: Vec<u32>,
    global_batch_size: u32,
    optimizer_memory_scaling: f64,
    peak_activation_bytes_per_sample: f64,
) -> PyResult<(f64, Option<f64>, Option<f64>)> {
    let graph = records::graph(profile)?;
    // These are closed forms without a search, so they keep the interpreter lock.
    let model = Model::of(&graph, global_batch_size).map_err(raised(py))?;
    let devices = Devices::new(&seps).map_err(raised(py))?;
    let found = columns(&model, &devices, optimizer_memory_scaling, peak_activation_bytes_per_sample);
    Ok((found.no_overlap, found.p3, found.overlap))
}

/// Returns the seconds of an all-reduce at the original's link speeds.
#[pyfunction]
fn legacy_all_reduce_s(py: Python<'_>, seps: Vec<u32>, devices: Vec<u32>, size: f64) -> PyResult<f64> {
    let cluster = Devices::new(&seps).map_err(raised(py))?;
    known(&cluster, &devices).map_err(raised(py))?;
    Ok(cluster.all_reduce_s(&devices, size))
}

/// Returns the seconds of a transfer between two stages at the original's link speeds.
#[pyfunction]
fn legacy_split_concat_s(
    py: Python<'_>,
    seps: Vec<u32>,
    senders: Vec<u32>,
    receivers: Vec<u32>,
    size: f64,
) -> PyResult<f64> {
    let cluster = Devices::new(&seps).map_err(raised(py))?;
    known(&cluster, &senders).and_then(|()| known(&cluster, &receivers)).map_err(raised(py))?;
    Ok(cluster.split_concat_s(&senders, &receivers, size))
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(legacy_plans, module)?)?;
    module.add_function(wrap_pyfunction!(legacy_states, module)?)?;
    module.add_function(wrap_pyfunction!(legacy_stage_layers, module)?)?;
    module.add_function(wrap_pyfunction!(legacy_columns, module)?)?;
    module.add_function(wrap_pyfunction!(legacy_all_reduce_s, module)?)?;
    module.add_function(wrap_pyfunction!(legacy_split_concat_s, module)?)
}
