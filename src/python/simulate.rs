//! Python bindings of the simulation. Costs come in as arrays, times and measures leave as arrays.

use std::sync::Arc;
use std::time::Duration;

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray2};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::schedule::Record;
use super::{to_py_err, watched};
use crate::control::Control;
use crate::error::{Error, Result};
use crate::schedule::Schedule;
use crate::simulate::communication::{Message, with_communication};
use crate::simulate::measures::until_cancelled;
use crate::simulate::{
    Communication, Costs, Inputs, StageBytes, StageTimes, Times, Transfer, idle, measure, memory, simulate, slack_s,
};

/// Mirror of the fields of `hpgo.timing.simulation.Columns`.
#[derive(FromPyObject)]
#[allow(clippy::struct_field_names, reason = "the unit belongs to the name")]
struct CostsRecord<'py> {
    /// Columns F, B, I, W, F‖B in seconds. The last is NaN where a pair takes the sum of its two passes.
    compute_s: PyReadonlyArray2<'py, f64>,
    /// Columns busy and latency in seconds, as in `gradient_s`.
    activation_s: PyReadonlyArray2<'py, f64>,
    gradient_s: PyReadonlyArray2<'py, f64>,
    gradient_sync_s: Vec<f64>,
    optimizer_s: Vec<f64>,
}

impl CostsRecord<'_> {
    fn to_costs(&self) -> Costs {
        let transfers = |array: &PyReadonlyArray2<'_, f64>| {
            let rows = array.as_array();
            rows.rows().into_iter().map(|row| Transfer { busy_s: row[0], latency_s: row[1] }).collect()
        };
        let stage_times = |row: numpy::ndarray::ArrayView1<'_, f64>| StageTimes {
            forward_s: row[0],
            backward_s: row[1],
            input_gradient_s: row[2],
            weight_gradient_s: row[3],
            overlapped_s: (!row[4].is_nan()).then_some(row[4]),
        };
        Costs {
            compute: self.compute_s.as_array().rows().into_iter().map(stage_times).collect(),
            activation: transfers(&self.activation_s),
            gradient: transfers(&self.gradient_s),
            gradient_sync_s: self.gradient_sync_s.clone(),
            optimizer_s: self.optimizer_s.clone(),
        }
    }

    /// Checks the number of columns. [`Costs::check`] checks lengths and numbers.
    fn check_columns(&self) -> Result<()> {
        for (name, array, columns) in [
            ("compute_s", &self.compute_s, 5),
            ("activation_s", &self.activation_s, 2),
            ("gradient_s", &self.gradient_s, 2),
        ] {
            let shape = array.as_array().dim();
            if shape.1 != columns {
                return Err(Error::argument(
                    format!("`{name}` has shape {shape:?}, but needs {columns} columns"),
                    "pass an array with one row for each stage",
                ));
            }
        }
        Ok(())
    }
}

/// Limit on the actions of a simulation that runs unwatched. Up to this size it ends before a user could interrupt it.
const UNWATCHED_ACTIONS: usize = 200_000;

/// A simulated schedule. Large results are computed only when a method asks for them.
#[pyclass(frozen, module = "hpgo._core")]
struct Simulation {
    schedule: Arc<Schedule>,
    costs: Costs,
    times: Times,
}

fn communication_of(name: &str) -> Result<Communication> {
    Ok(match name {
        "latency" => Communication::Latency,
        "link" => Communication::Link,
        "stream" => Communication::Stream { deferred_receives: false },
        "stream_deferred" => Communication::Stream { deferred_receives: true },
        "rendezvous" => Communication::Rendezvous,
        _ => {
            return Err(Error::argument(
                format!("there is no communication mode `{name}`"),
                "choose latency, link, stream, stream_deferred or rendezvous",
            ));
        }
    })
}

#[pyfunction]
#[pyo3(name = "simulate")]
fn simulate_schedule(
    py: Python<'_>,
    schedule: Record<'_>,
    costs: CostsRecord<'_>,
    communication: &str,
    iterations: u32,
) -> PyResult<Simulation> {
    // Convert everything first, because the arrays can't be read without the interpreter lock.
    let prepared = (|| {
        costs.check_columns()?;
        Ok((schedule.to_schedule()?, costs.to_costs(), communication_of(communication)?))
    })();
    let ((schedule, is_checked), costs, communication) = prepared.map_err(|error| to_py_err(py, &error))?;
    let control = Control::with_deadline(None::<Duration>);
    let is_fast = schedule.action_count().saturating_mul(iterations as usize) <= UNWATCHED_ACTIONS;
    let run = || {
        // Schedules from elsewhere are validated here, because the simulation relies on a valid one.
        if !is_checked {
            schedule.validate()?;
        }
        let times = simulate(&schedule, &costs, communication, iterations, &control)?;
        Ok(Simulation { schedule, costs, times })
    };
    if is_fast {
        py.detach(run).map_err(|error| to_py_err(py, &error))
    } else {
        watched(py, &control, None, false, run)
    }
}

impl Simulation {
    /// Returns the result of `work`, which runs under [`watched`] unless the simulation is small.
    fn compute<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&Control) -> Result<T> + Send) -> PyResult<T> {
        let control = Control::default();
        if self.times.start_s.len() <= UNWATCHED_ACTIONS {
            py.detach(|| work(&control)).map_err(|error| to_py_err(py, &error))
        } else {
            watched(py, &control, None, false, || work(&control))
        }
    }
}

/// Returns the sends and receives between the actions of each rank, in PyTorch's notation.
#[pyfunction]
fn communication_lists(py: Python<'_>, schedule: Record<'_>, deferred_receives: bool) -> PyResult<Vec<Vec<String>>> {
    let lists = schedule.to_schedule().and_then(|(schedule, is_checked)| {
        if !is_checked {
            schedule.validate()?;
        }
        with_communication(&schedule, deferred_receives)
    });
    let texts = lists.map(|lists| lists.iter().map(|list| list.iter().map(ToString::to_string).collect()).collect());
    texts.map_err(|error| to_py_err(py, &error))
}

#[pymethods]
impl Simulation {
    #[getter]
    fn makespan_s(&self) -> f64 {
        self.times.step_s
    }

    /// Returns all actions as columns, by rank, then by iteration.
    fn actions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let columns = self.compute(py, |control| self.action_columns(control))?;
        let dict = PyDict::new(py);
        dict.set_item("rank", columns.rank.into_pyarray(py))?;
        dict.set_item("stage", columns.stage.into_pyarray(py))?;
        dict.set_item("micro_batch", columns.micro_batch.into_pyarray(py))?;
        dict.set_item("kind", columns.kind.into_pyarray(py))?;
        dict.set_item("backward_stage", columns.backward_stage.into_pyarray(py))?;
        dict.set_item("backward_micro_batch", columns.backward_micro_batch.into_pyarray(py))?;
        Ok(dict)
    }

    /// Returns start and end of all actions in seconds, in the order of `actions`.
    fn times<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("start_s", self.times.start_s.clone().into_pyarray(py))?;
        dict.set_item("end_s", self.times.end_s.clone().into_pyarray(py))?;
        Ok(dict)
    }

    /// Returns the messages between ranks as columns.
    fn transfers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let columns = self.compute(py, |control| self.transfer_columns(control))?;
        let dict = PyDict::new(py);
        dict.set_item("from_rank", columns.from_rank.into_pyarray(py))?;
        dict.set_item("to_rank", columns.to_rank.into_pyarray(py))?;
        dict.set_item("stage", columns.stage.into_pyarray(py))?;
        dict.set_item("micro_batch", columns.micro_batch.into_pyarray(py))?;
        dict.set_item("kind", columns.kind.into_pyarray(py))?;
        dict.set_item("start_s", columns.start_s.into_pyarray(py))?;
        dict.set_item("end_s", columns.end_s.into_pyarray(py))?;
        Ok(dict)
    }

    /// Returns gradient reductions and optimizer steps as columns, by iteration and stage.
    fn syncs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (mut stages, mut start_s, mut end_s, mut optimizer_end_s) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for iteration in 0..self.times.iterations as usize {
            for stage in 0..self.schedule.rank_of_stage.len() {
                let from_s = self.times.synchronized_from_s(&self.schedule, iteration, stage);
                let (grad_reduce_s, step_s) = (self.costs.gradient_sync_s[stage], self.costs.optimizer_s[stage]);
                // Stages without backwards have negative infinity. A stage that takes no time ends at 0, which counts.
                if from_s >= 0.0 && grad_reduce_s + step_s > 0.0 {
                    stages.push(u32::try_from(stage).unwrap_or(u32::MAX));
                    start_s.push(from_s);
                    end_s.push(from_s + grad_reduce_s);
                    optimizer_end_s.push(from_s + grad_reduce_s + step_s);
                }
            }
        }
        let dict = PyDict::new(py);
        dict.set_item("stage", stages.into_pyarray(py))?;
        dict.set_item("start_s", start_s.into_pyarray(py))?;
        dict.set_item("end_s", end_s.into_pyarray(py))?;
        dict.set_item("optimizer_end_s", optimizer_end_s.into_pyarray(py))?;
        Ok(dict)
    }

    /// Returns the intervals of idle time as columns.
    fn idle<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stretches = self.compute(py, |control| idle(&self.schedule, &self.costs, &self.times, control))?;
        let ranks: Vec<u32> = stretches.iter().map(|one| u32::try_from(one.rank).unwrap_or(u32::MAX)).collect();
        let dict = PyDict::new(py);
        dict.set_item("rank", ranks.into_pyarray(py))?;
        dict.set_item("start_s", stretches.iter().map(|one| one.start_s).collect::<Vec<_>>().into_pyarray(py))?;
        dict.set_item("end_s", stretches.iter().map(|one| one.end_s).collect::<Vec<_>>().into_pyarray(py))?;
        dict.set_item("cause", stretches.iter().map(|one| one.cause as u8).collect::<Vec<_>>().into_pyarray(py))?;
        Ok(dict)
    }

    /// Returns how much later each action could end without a longer makespan, in seconds.
    fn slack_s<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<f64>>> {
        let slack = self.compute(py, |control| slack_s(&self.schedule, &self.costs, &self.times, control))?;
        Ok(slack.into_pyarray(py))
    }

    /// Returns the memory of each rank as a step function. `stages` has shape `(stages, 7)`: bytes in the order of
    /// [`StageBytes`].
    #[allow(clippy::type_complexity, reason = "one pair of arrays a rank")]
    fn memory<'py>(
        &self,
        py: Python<'py>,
        stages: PyReadonlyArray2<'py, f64>,
    ) -> PyResult<Vec<(Bound<'py, PyArray1<f64>>, Bound<'py, PyArray1<f64>>)>> {
        let rows = stages.as_array();
        if rows.dim() != (self.schedule.rank_of_stage.len(), 7) {
            let error = Error::argument(
                format!("bytes of stages have shape {:?}, but need 7 columns", rows.dim()),
                "pass one row of 7 numbers for each stage",
            );
            return Err(to_py_err(py, &error));
        }
        let bytes_of = |row: numpy::ndarray::ArrayView1<'_, f64>| StageBytes {
            weights: row[0],
            gradients: row[1],
            optimizer: row[2],
            activation: row[3],
            weight_gradient_stash: row[4],
            output: row[5],
            recomputed: row[6],
        };
        let stages: Vec<StageBytes> = rows.rows().into_iter().map(bytes_of).collect();
        let curves = self.compute(py, |control| memory(&self.schedule, &self.times, &stages, control))?;
        Ok(curves.into_iter().map(|(time_s, bytes)| (time_s.into_pyarray(py), bytes.into_pyarray(py))).collect())
    }

    /// Returns the fields of `hpgo.timing.timeline.Measures` that need no bytes.
    fn measures<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let measures = self.compute(py, |control| measure(&self.schedule, &self.costs, &self.times, control))?;
        let dict = PyDict::new(py);
        dict.set_item("makespan_s", measures.makespan_s)?;
        dict.set_item("max_rank_span_s", measures.max_rank_span_s)?;
        dict.set_item("busy_s", measures.busy_s)?;
        dict.set_item("idle_over_total", measures.idle_over_total)?;
        dict.set_item("idle_over_busy", measures.idle_over_busy)?;
        dict.set_item("idle_over_busiest", measures.idle_over_busiest)?;
        dict.set_item("idle_by_cause_s", measures.idle_by_cause_s)?;
        dict.set_item("peak_in_flight", measures.peak_in_flight)?;
        dict.set_item("peak_in_flight_freed_at_input_gradient", measures.peak_in_flight_freed_at_input_gradient)?;
        dict.set_item("messages", measures.messages)?;
        Ok(dict)
    }
}

#[derive(Default)]
struct ActionColumns {
    rank: Vec<i32>,
    stage: Vec<i32>,
    micro_batch: Vec<i32>,
    kind: Vec<u8>,
    backward_stage: Vec<i32>,
    backward_micro_batch: Vec<i32>,
}

#[derive(Default)]
struct TransferColumns {
    from_rank: Vec<u32>,
    to_rank: Vec<u32>,
    stage: Vec<u32>,
    micro_batch: Vec<u32>,
    kind: Vec<u8>,
    start_s: Vec<f64>,
    end_s: Vec<f64>,
}

impl Simulation {
    fn action_columns(&self, control: &Control) -> Result<ActionColumns> {
        let count = self.times.start_s.len();
        let number = |number: u32| i32::try_from(number).unwrap_or(i32::MAX);
        let mut columns = ActionColumns {
            rank: Vec::with_capacity(count),
            stage: Vec::with_capacity(count),
            micro_batch: Vec::with_capacity(count),
            kind: Vec::with_capacity(count),
            backward_stage: Vec::with_capacity(count),
            backward_micro_batch: Vec::with_capacity(count),
        };
        for (rank, order) in (0..).zip(&self.schedule.action_lists) {
            for iteration in 0..self.times.iterations {
                control.check()?;
                // Number micro-batches through all iterations, so that tables and pictures can tell them apart.
                let first = iteration * self.schedule.total_micro_batches();
                columns.rank.resize(columns.rank.len() + order.len(), rank);
                columns.stage.extend(order.iter().map(|action| number(action.stage)));
                columns.micro_batch.extend(order.iter().map(|action| number(first + action.micro_batch)));
                columns.kind.extend(order.iter().map(|action| action.kind as u8));
                columns.backward_stage.extend(order.iter().map(|action| number(action.backward.0)));
                columns.backward_micro_batch.extend(order.iter().map(|action| number(first + action.backward.1)));
            }
        }
        Ok(columns)
    }

    fn transfer_columns(&self, control: &Control) -> Result<TransferColumns> {
        let inputs = Inputs::of(&self.schedule);
        let micro_batches = self.schedule.total_micro_batches();
        let mut columns = TransferColumns::default();
        for iteration in 0..self.times.iterations {
            let halves = self.schedule.action_lists.iter().flatten().flat_map(|action| action.halves());
            for half in until_cancelled(halves, control) {
                let Some(message) = Message::sent_by(half?, &self.schedule, inputs) else { continue };
                let cost = message.cost(&self.costs);
                let end_s = self.times.arrival_s[iteration as usize * inputs.count() + message.input];
                columns.from_rank.push(self.schedule.rank_of_stage[message.from_stage as usize]);
                columns.to_rank.push(self.schedule.rank_of_stage[message.to_stage as usize]);
                columns.stage.push(message.from_stage);
                columns.micro_batch.push(message.micro_batch + iteration * micro_batches);
                columns.kind.push(u8::from(message.is_gradient));
                // For a message that leaves at time 0, the difference may round to a negative number.
                columns.start_s.push((end_s - cost.busy_s - cost.latency_s).max(0.0));
                columns.end_s.push(end_s);
            }
        }
        Ok(columns)
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Simulation>()?;
    module.add_function(wrap_pyfunction!(simulate_schedule, module)?)?;
    module.add_function(wrap_pyfunction!(communication_lists, module)?)?;
    Ok(())
}
