//! Python bindings of schedules: one array of actions, and the row at which each rank starts.
//!
//! A schedule that was built or read here also carries its Rust object, so that it is neither copied nor checked again
//! when it comes back.

use std::sync::Arc;

use numpy::ndarray::Array2;
use numpy::{IntoPyArray, PyArray2, PyReadonlyArray2};
use pyo3::prelude::*;

use super::{to_py_err, watched};
use crate::control::Control;
use crate::error::{Error, Result};
use crate::schedule::{Action, FAMILIES, Kind, Request, Schedule, Synchronization, VirtualStages, family};

/// A schedule that has been validated.
#[pyclass(frozen, module = "hpgo._core")]
struct CheckedSchedule(Arc<Schedule>);

/// Mirror of the fields of `hpgo.programs.schedule.Schedule`. A row of `actions` is kind, stage, micro-batch, and stage
/// and micro-batch of the backward half. Rank `r` has rows `rank_starts[r]..rank_starts[r + 1]`.
#[derive(FromPyObject)]
pub(super) struct Record<'py> {
    name: String,
    stages_per_pipeline: u32,
    micro_batches: Vec<(u32, u32)>,
    rank_of_stage: Vec<u32>,
    actions: PyReadonlyArray2<'py, u32>,
    rank_starts: Vec<usize>,
    synchronization: String,
    /// Weight versions of each rank. Empty for one version on every rank.
    weight_versions: Vec<u32>,
    /// The Rust object of a validated schedule. `None` if the arrays come from elsewhere.
    #[pyo3(attribute("_checked"))]
    checked: Option<Bound<'py, CheckedSchedule>>,
}

// The names are values in Python and in files, so they keep their spelling.
const SYNCHRONIZATIONS: [(Synchronization, &str); 3] = [
    (Synchronization::Flush, "flush"),
    (Synchronization::Asynchronous, "asynchronous"),
    (Synchronization::LockStep, "lock step"),
];

fn synchronization_name(synchronization: Synchronization) -> &'static str {
    SYNCHRONIZATIONS.iter().find(|known| known.0 == synchronization).expect("all three are there").1
}

// The index is the code of a kind in the array. `Kind as u32` writes it, so the order must be that of the enum.
const KINDS: [Kind; 5] = [Kind::Forward, Kind::Backward, Kind::InputGradient, Kind::WeightGradient, Kind::Overlapped];

impl Record<'_> {
    /// Returns the schedule, and whether it has been validated.
    pub(super) fn to_schedule(&self) -> Result<(Arc<Schedule>, bool)> {
        match &self.checked {
            Some(checked) => Ok((Arc::clone(&checked.get().0), true)),
            None => Ok((Arc::new(self.of_arrays()?), false)),
        }
    }

    fn of_arrays(&self) -> Result<Schedule> {
        let rows = self.actions.as_array();
        // All malformed arrays get one error: only code that builds them by hand can cause it.
        let malformed = || {
            Error::schedule(
                format!("`actions` of shape {:?} doesn't fit `rank_starts`", rows.shape()),
                "build schedules with `hpgo.schedule` or `Schedule.from_text`",
            )
        };
        if rows.ncols() != 5 || self.rank_starts.first() != Some(&0) || self.rank_starts.last() != Some(&rows.nrows()) {
            return Err(malformed());
        }
        let order = |part: &[usize]| {
            if part[0] > part[1] || part[1] > rows.nrows() {
                return Err(malformed());
            }
            let action = |row: usize| {
                let kind = *KINDS.get(rows[[row, 0]] as usize).ok_or_else(malformed)?;
                let backward = (rows[[row, 3]], rows[[row, 4]]);
                Ok(Action { kind, stage: rows[[row, 1]], micro_batch: rows[[row, 2]], backward })
            };
            (part[0]..part[1]).map(action).collect()
        };
        let ranks = self.rank_starts.len() - 1;
        let weight_versions = match self.weight_versions.len() {
            0 => vec![1; ranks],
            count if count == ranks => self.weight_versions.clone(),
            _ => return Err(malformed()),
        };
        let synchronization =
            SYNCHRONIZATIONS.iter().find(|known| known.1 == self.synchronization).ok_or_else(malformed)?.0;
        Ok(Schedule {
            name: self.name.clone(),
            stages_per_pipeline: self.stages_per_pipeline,
            micro_batches: self.micro_batches.iter().map(|&(start, end)| start..end).collect(),
            rank_of_stage: self.rank_of_stage.clone(),
            action_lists: self.rank_starts.windows(2).map(order).collect::<Result<_>>()?,
            synchronization,
            weight_versions,
        })
    }
}

/// Result for Python with the fields of [`Record`].
#[derive(IntoPyObject)]
pub(super) struct Built<'py> {
    name: String,
    stages_per_pipeline: u32,
    micro_batches: Vec<(u32, u32)>,
    rank_of_stage: Vec<u32>,
    actions: Bound<'py, PyArray2<u32>>,
    rank_starts: Vec<usize>,
    synchronization: &'static str,
    weight_versions: Vec<u32>,
    checked: CheckedSchedule,
}

/// A validated schedule and its columns, built without the interpreter lock.
pub(super) struct Columns {
    schedule: Schedule,
    actions: Array2<u32>,
    rank_starts: Vec<usize>,
}

impl Columns {
    /// Converts a validated schedule to columns.
    pub(super) fn of(schedule: Schedule, control: &Control) -> Result<Self> {
        let mut rank_starts = vec![0];
        let mut rows = Vec::with_capacity(5 * schedule.action_count());
        for order in &schedule.action_lists {
            control.check()?;
            for action in order {
                let Action { kind, stage, micro_batch, backward } = *action;
                rows.extend([kind as u32, stage, micro_batch, backward.0, backward.1]);
            }
            rank_starts.push(rows.len() / 5);
        }
        let actions = Array2::from_shape_vec((rows.len() / 5, 5), rows).expect("five numbers a row");
        Ok(Self { schedule, actions, rank_starts })
    }

    pub(super) fn into_python(self, py: Python<'_>) -> Built<'_> {
        let Self { schedule, actions, rank_starts } = self;
        Built {
            name: schedule.name.clone(),
            stages_per_pipeline: schedule.stages_per_pipeline,
            micro_batches: schedule.micro_batches.iter().map(|range| (range.start, range.end)).collect(),
            rank_of_stage: schedule.rank_of_stage.clone(),
            actions: actions.into_pyarray(py),
            rank_starts,
            synchronization: synchronization_name(schedule.synchronization),
            weight_versions: schedule.weight_versions.clone(),
            checked: CheckedSchedule(Arc::new(schedule)),
        }
    }
}

/// Returns the schedule that `make` builds. Runs it under [`watched`] unless it is fast.
fn built(py: Python<'_>, is_fast: bool, make: impl FnOnce(&Control) -> Result<Schedule> + Send) -> PyResult<Built<'_>> {
    let control = Control::default();
    let work = || Columns::of(make(&control)?, &control);
    let columns = if is_fast {
        // A watched call starts a thread and wakes up every 20 ms, which would dominate the time of a small schedule.
        py.detach(work).map_err(|error| to_py_err(py, &error))?
    } else {
        watched(py, &control, None, false, work)?
    };
    Ok(columns.into_python(py))
}

/// Limit below which a call is fast enough to run unwatched: ranks times micro-batches, or bytes of text.
const UNWATCHED_SIZE: u64 = 10_000;

#[pyfunction]
fn build_schedule<'py>(py: Python<'py>, name: &str, request: Request) -> PyResult<Built<'py>> {
    let is_fast = u64::from(request.ranks) * u64::from(request.micro_batches) <= UNWATCHED_SIZE;
    built(py, is_fast, |control| family(name)?.build_under(&request, control))
}

#[pyfunction]
fn without_flush<'py>(py: Python<'py>, schedule: Record<'_>, iterations: u32) -> PyResult<Built<'py>> {
    let schedule = schedule.to_schedule();
    built(py, false, |_| schedule?.0.without_flush(iterations))
}

#[pyfunction]
fn read_schedule<'py>(py: Python<'py>, name: &str, text: &str) -> PyResult<Built<'py>> {
    built(py, text.len() as u64 <= UNWATCHED_SIZE, |_| Schedule::from_text(name, text))
}

#[pyfunction]
fn write_schedule(py: Python<'_>, schedule: Record<'_>, in_steps: bool) -> PyResult<String> {
    let schedule = schedule.to_schedule();
    py.detach(|| {
        let (schedule, _) = schedule?;
        if in_steps { schedule.to_text_in_steps() } else { Ok(schedule.to_text()) }
    })
    .map_err(|error| to_py_err(py, &error))
}

#[pyfunction]
fn validate_schedule(py: Python<'_>, schedule: Record<'_>) -> PyResult<()> {
    let schedule = schedule.to_schedule();
    py.detach(|| schedule?.0.validate()).map_err(|error| to_py_err(py, &error))
}

#[pyfunction]
fn peak_in_flight(py: Python<'_>, schedule: Record<'_>) -> PyResult<Vec<u32>> {
    let schedule = schedule.to_schedule();
    py.detach(|| Ok(schedule?.0.peak_in_flight())).map_err(|error| to_py_err(py, &error))
}

/// One row of the table of schedule families.
#[derive(IntoPyObject)]
struct Row {
    name: &'static str,
    summary: &'static str,
    source: &'static str,
    limits: &'static str,
    options: Vec<&'static str>,
    virtual_stages_per_rank: &'static str,
    chains: u32,
    splits_backward: bool,
    trains: bool,
    synchronization: &'static str,
    weight_versions: &'static str,
    peak: &'static str,
    bubble: &'static str,
}

#[pyfunction]
fn schedule_families() -> Vec<Row> {
    let row = |family: &crate::schedule::Family| Row {
        name: family.name,
        summary: family.summary,
        source: family.source,
        limits: family.limits,
        options: family.options.to_vec(),
        virtual_stages_per_rank: match family.virtual_stages_per_rank {
            VirtualStages::Exactly(1) => "1",
            VirtualStages::Exactly(_) => "2",
            VirtualStages::Several => "2 or more",
            VirtualStages::Even => "even",
        },
        chains: family.chains,
        splits_backward: family.splits_backward,
        trains: family.trains,
        synchronization: synchronization_name(family.synchronization),
        weight_versions: family.weight_versions,
        peak: family.peak,
        bubble: family.bubble,
    };
    FAMILIES.iter().map(row).collect()
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CheckedSchedule>()?;
    module.add_function(wrap_pyfunction!(build_schedule, module)?)?;
    module.add_function(wrap_pyfunction!(without_flush, module)?)?;
    module.add_function(wrap_pyfunction!(read_schedule, module)?)?;
    module.add_function(wrap_pyfunction!(write_schedule, module)?)?;
    module.add_function(wrap_pyfunction!(validate_schedule, module)?)?;
    module.add_function(wrap_pyfunction!(peak_in_flight, module)?)?;
    module.add_function(wrap_pyfunction!(schedule_families, module)?)?;
    Ok(())
}
