//! Python bindings of the planner. A [`Session`] converts model, cuts and cluster once, and all searches use them.

use std::sync::OnceLock;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyModule;

use super::plan_records::{
    ClassicsRecord, ClusterRecord, PlanRecord, SearchRecord, SettingsRecord, StageRecord, TriedRecord,
    recompute_choices,
};
use super::records::ProfileRecord;
use super::schedule::Record;
use super::{to_py_err, watched};
use crate::control::{Control, Stopped};
use crate::cost::network::Cluster;
use crate::cost::{DeviceKinds, LayerSums};
use crate::error::{Error, Result};
use crate::model::graph::Graph;
use crate::model::lineage::Lineage;
use crate::model::states::{CutPoints, Cuts};
use crate::planner::action_lists::{self, Outcome, Problem, VirtualStageLimits};
use crate::planner::hybrid::{self, CandidatePlan, EvaluatedPlan, Schedules, Settings};
use crate::planner::shares_by_speed;

fn name_of(stopped: Stopped) -> &'static str {
    match stopped {
        Stopped::Deadline => "time_limit",
        Stopped::Interrupt => "interrupt",
        Stopped::Effort => "work_limit",
    }
}

/// A micro-batch size with the allowed values of recomputation, or with the micro-batches in flight and the recomputation
/// of each stage.
type Variant = (u32, Vec<bool>, Option<(Vec<u32>, Vec<bool>)>);

fn control_of(time_limit_s: Option<f64>) -> Control {
    Control::with_deadline(time_limit_s.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)))
}

/// A model with its possible cuts, and a cluster. The stub file lists the methods.
#[pyclass(frozen, module = "hpgo._core")]
struct Session {
    graph: Graph,
    cluster: Cluster,
    /// Times on several kinds of devices. `None` if the profile's own times are used, divided by speeds.
    kinds: Option<DeviceKinds>,
    /// Consecutive parts of the model, if a stage must hold whole parts. `None` if any cut is allowed.
    parts: Option<Vec<Vec<usize>>>,
    /// Groups of layers that no cut may separate.
    together: Vec<Vec<usize>>,
    /// Cut points and their sums, computed when first needed. This takes seconds for some branching models.
    cuts: OnceLock<(CutPoints, LayerSums)>,
}

/// A session with the settings of one search, its cuts, and its control.
struct Asked<'a> {
    session: &'a Session,
    states: &'a CutPoints,
    model: &'a LayerSums,
    settings: &'a Settings,
    control: &'a Control,
}

impl<'a> Asked<'a> {
    fn problem(&self) -> Problem<'a> {
        Problem { model: self.model, cluster: &self.session.cluster, settings: self.settings }
    }

    fn record(&self, (plan, evaluated): (CandidatePlan, EvaluatedPlan)) -> PlanRecord {
        let stages = (plan.stages.iter().zip(evaluated.stages).zip(plan.devices(&self.session.cluster)))
            .map(|((stage, cost), devices)| StageRecord {
                layers: self.states.layers_between(stage.begin, stage.end),
                devices,
                max_in_flight: stage.max_in_flight,
                cost,
            })
            .collect();
        PlanRecord {
            pipeline_micro_batch_size: plan.micro_batch,
            step_s: evaluated.step_s,
            stages,
            virtual_stages_per_rank: 1,
            actions: None,
        }
    }

    /// Returns why only some cuts were searched, or `None` if all were.
    fn one_order(&self) -> Option<String> {
        match self.states.cuts() {
            Cuts::Exact => None,
            Cuts::Fewer { why } | Cuts::LinearOrder { why } => Some(why.clone()),
        }
    }

    fn certified(&self, answer: hybrid::SearchResult) -> (PlanRecord, SearchRecord) {
        let search = SearchRecord {
            lower_bound_s: Some(answer.lower_bound_s),
            searched_cuts_bound_s: answer.searched_cuts_bound_s,
            node_aligned_bound_s: answer.node_aligned_bound_s,
            is_node_aligned: answer.node_aligned_bound_s.is_some(),
            one_order: self.one_order(),
            stop_reason: answer.stopped.map(name_of),
            explored_labels: answer.labels,
            simulated: answer.simulated,
            ..SearchRecord::default()
        };
        (self.record((answer.plan, answer.evaluated)), search)
    }

    fn tried(&self, (schedule, outcome): action_lists::Tried) -> Result<TriedRecord> {
        let nothing =
            |error: &Error| (None, SearchRecord::default(), Some(error.to_string()), Some(error.hint().to_owned()));
        let (plan, search, message, hint) = match outcome {
            Outcome::Certified(answer) => {
                let (plan, search) = self.certified(*answer);
                (Some(plan), search, None, None)
            }
            Outcome::Quick(answer) => {
                // This plan comes from a search that was cut off by the time limit, so it has no bound.
                let stop_reason = Some(name_of(Stopped::Deadline));
                let search = SearchRecord { stop_reason, one_order: self.one_order(), ..SearchRecord::default() };
                (Some(self.record((answer.plan, answer.evaluated))), search, None, None)
            }
            Outcome::Simulated(found) => {
                let search = SearchRecord {
                    lower_bound_s: found.lower_bound_s,
                    is_node_aligned: found.is_node_aligned,
                    one_order: self
                        .one_order()
                        .or_else(|| (!found.has_all_cuts).then(|| "each cut includes all layers before it".to_owned())),
                    stop_reason: self.control.stopped().map(name_of),
                    simulated: found.simulated,
                    ..SearchRecord::default()
                };
                (Some(self.evaluated_again(found.plan)?), search, None, None)
            }
            Outcome::Nothing(error) => nothing(&error),
        };
        Ok(TriedRecord { schedule, plan, search, message, hint })
    }

    /// Evaluates a simulated plan again. The search sums the same numbers in another order. After this evaluation, the
    /// costs are exactly those that reading the plan's file gives.
    fn evaluated_again(&self, plan: action_lists::SimulatedPlan) -> Result<PlanRecord> {
        let layers: Vec<_> = plan.ends.iter().map(|&(begin, end)| self.states.layers_between(begin, end)).collect();
        let settings = Settings { pipeline_micro_batch_sizes: vec![plan.micro_batch], ..self.settings.clone() };
        let recompute = plan.run.stages.iter().map(|stage| stage.recompute).collect();
        self.session.ordered(&settings, layers, plan.devices, &plan.schedule, recompute)
    }
}

impl Session {
    /// Runs `work` with all cuts that plans may have, or with the cuts that the problem names.
    fn answer<T: Send>(
        &self,
        py: Python<'_>,
        settings: SettingsRecord,
        control: &Control,
        progress: Option<&Py<PyAny>>,
        keep_partial: bool,
        work: impl FnOnce(&Asked<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        let settings = settings.settings();
        watched(py, control, progress, keep_partial, || {
            let (states, model) = self.cuts(control)?;
            work(&Asked { session: self, states, model, settings: &settings, control })
        })
    }

    /// Returns the sums over layers for these cuts.
    fn sums(&self, states: &CutPoints) -> LayerSums {
        match &self.kinds {
            Some(kinds) => kinds.sums(&self.graph, states),
            None => LayerSums::new(&self.graph, states),
        }
    }

    fn cuts(&self, control: &Control) -> Result<&(CutPoints, LayerSums)> {
        if let Some(known) = self.cuts.get() {
            return Ok(known);
        }
        let states = match &self.parts {
            None => CutPoints::for_plans_keeping(&self.graph, &self.together, control)?,
            Some(parts) => CutPoints::between(&self.graph, parts)?,
        };
        let model = self.sums(&states);
        Ok(self.cuts.get_or_init(|| (states, model)))
    }

    /// Runs `work` with the cuts that `cuts` returns, unless the problem names its own.
    fn answer_at<T: Send>(
        &self,
        py: Python<'_>,
        settings: SettingsRecord,
        control: &Control,
        cuts: impl FnOnce(&Graph) -> Result<CutPoints> + Send,
        work: impl FnOnce(&Asked<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        // The cuts of a model without branches are few. Once they are listed, a coarser list saves nothing.
        if self.parts.is_some()
            || !self.together.is_empty()
            || self.cuts.get().is_some_and(|(states, _)| *states.cuts() == Cuts::Exact && states.is_linear())
        {
            return self.answer(py, settings, control, None, false, work);
        }
        let settings = settings.settings();
        watched(py, control, None, false, || {
            let states = cuts(&self.graph)?;
            let model = self.sums(&states);
            work(&Asked { session: self, states: &states, model: &model, settings: &settings, control })
        })
    }

    /// Whether no plan fits, proven without listing the cuts of a branching model, which takes longer.
    fn fits_nowhere(&self, settings: &Settings, schedules: Schedules, control: &Control) -> Result<bool> {
        let (model, lineage) = (self.sums(&one_stage(&self.graph)?), Lineage::of(&self.graph)?);
        hybrid::nothing_fits_with_any_cuts(&model, lineage.as_ref(), &self.cluster, settings, schedules, control)
    }

    /// Evaluates stages that run the given action lists.
    fn ordered(
        &self,
        settings: &Settings,
        layers: Vec<Vec<usize>>,
        devices: Vec<Vec<u32>>,
        schedule: &crate::schedule::Schedule,
        recompute: Vec<bool>,
    ) -> Result<PlanRecord> {
        let states = CutPoints::between(&self.graph, &layers)?;
        let model = self.sums(&states);
        let (micro_batch, run) =
            action_lists::evaluate(&model, &self.cluster, settings, &devices, schedule, recompute)?;
        Ok(run_record(&states, micro_batch, devices, run, schedule))
    }
}

/// Returns cut points with no cut inside the model.
fn one_stage(graph: &Graph) -> Result<CutPoints> {
    CutPoints::between(graph, &[(0..graph.layers.len()).collect()])
}

/// Returns the record of a plan with one stage between each two neighboring cuts, run with the given action lists. The
/// costs assume the model's own order of layers, so the record lists the layers in this order.
fn run_record(
    states: &CutPoints,
    pipeline_micro_batch_size: u32,
    devices: Vec<Vec<u32>>,
    run: action_lists::Run,
    schedule: &crate::schedule::Schedule,
) -> PlanRecord {
    let stages = (devices.into_iter().enumerate().zip(run.stages.into_iter().zip(run.in_flight)))
        .map(|((stage, devices), (cost, max_in_flight))| StageRecord {
            layers: states.layers_between(stage, stage + 1),
            devices,
            max_in_flight,
            cost,
        })
        .collect();
    let actions = Some(schedule.to_text().lines().map(str::to_owned).collect());
    let virtual_stages_per_rank = schedule.rank_of_stage.len() / schedule.action_lists.len().max(1);
    PlanRecord { pipeline_micro_batch_size, step_s: run.step_s, stages, virtual_stages_per_rank, actions }
}

#[pymethods]
impl Session {
    /// `type_of_node` has the index of each node's type among the profile's device types, or `None` for a node whose
    /// type has no times. Without it, the profile's own times are divided by speeds.
    #[new]
    #[pyo3(signature = (profile, cluster, parts, together, type_of_node=None))]
    fn new(
        py: Python<'_>,
        profile: ProfileRecord,
        cluster: ClusterRecord,
        parts: Option<Vec<Vec<usize>>>,
        together: Vec<Vec<usize>>,
        type_of_node: Option<Vec<Option<u32>>>,
    ) -> PyResult<Self> {
        let made = || {
            let types = profile.times_by_type()?;
            let graph: Graph = profile.try_into()?;
            let (kinds, cluster) = match type_of_node {
                Some(type_of_node) => DeviceKinds::of(&graph, &types, cluster.into(), &type_of_node)?,
                None => (None, cluster.into()),
            };
            Ok(Self { graph, cluster, kinds, parts, together, cuts: OnceLock::new() })
        };
        made().map_err(|error| to_py_err(py, &error))
    }

    /// Returns the best plan and its bounds.
    fn plan(
        &self,
        py: Python<'_>,
        settings: SettingsRecord,
        time_limit_s: Option<f64>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<(PlanRecord, SearchRecord)> {
        let control = control_of(time_limit_s);
        let settings = settings.settings();
        watched(py, &control, progress.as_ref(), true, || {
            // Listing cuts can take seconds. A proof that nothing fits is faster, and makes the list needless.
            let is_listed = self.cuts.get().is_some() || self.parts.is_some();
            // These proofs count even shares.
            let is_even = !settings.shares_by_speed;
            if is_even && !is_listed && self.fits_nowhere(&settings, Schedules::OF_SETTINGS, &control)? {
                return Err(hybrid::no_plan_fits());
            }
            let (states, model) = self.cuts(&control)?;
            let asked = Asked { session: self, states, model, settings: &settings, control: &control };
            let (answer, shares_by_speed) = if settings.shares_by_speed {
                shares_by_speed::plan(model, &self.cluster, &settings, &control)?
            } else {
                (hybrid::plan(model, &self.cluster, &settings, &control)?, false)
            };
            let (plan, search) = asked.certified(answer);
            Ok((plan, SearchRecord { shares_by_speed, ..search }))
        })
    }

    /// Returns a plan whose step takes at most `limit_s`, whose fullest device holds less than `enough_bytes`, and that
    /// needs the least memory found. The second value is the reason why the search stopped early.
    fn min_memory(
        &self,
        py: Python<'_>,
        settings: SettingsRecord,
        limit_s: f64,
        enough_bytes: f64,
        time_limit_s: Option<f64>,
    ) -> PyResult<(Option<PlanRecord>, Option<&'static str>)> {
        self.answer(py, settings, &control_of(time_limit_s), None, true, |asked| {
            let Problem { model, cluster, settings } = asked.problem();
            let smaller_plan = hybrid::min_memory(model, cluster, settings, limit_s, enough_bytes, asked.control)?;
            Ok((smaller_plan.plan.map(|found| asked.record(found)), smaller_plan.stopped.map(name_of)))
        })
    }

    /// Returns the best plan of each of these schedules, at least one of which `plan` does not search for. The second
    /// value is the reason why the search stopped before all were complete.
    fn search(
        &self,
        py: Python<'_>,
        settings: SettingsRecord,
        schedules: Vec<String>,
        time_limit_s: Option<f64>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<(Vec<TriedRecord>, Option<&'static str>)> {
        let control = control_of(time_limit_s);
        let limits = VirtualStageLimits {
            needs_full_ranks: settings.needs_full_ranks,
            has_single_wave: settings.has_single_wave,
        };
        self.answer(py, settings, &control, progress.as_ref(), true, |asked| {
            let tried = action_lists::search(&asked.problem(), &schedules, limits, asked.control)?;
            let stopped = asked.control.stopped().map(name_of);
            Ok((tried.into_iter().map(|tried| asked.tried(tried)).collect::<Result<_>>()?, stopped))
        })
    }

    /// Returns the baseline plans. The search is short, and returns nothing if it is interrupted.
    fn classics(
        &self,
        py: Python<'_>,
        settings: SettingsRecord,
        time_limit_s: Option<f64>,
    ) -> PyResult<ClassicsRecord> {
        let control = control_of(time_limit_s);
        let classics = |asked: &Asked<'_>| {
            let Problem { model, cluster, settings } = asked.problem();
            let pipeline_only = hybrid::pipeline_only(model, cluster, settings, asked.control)?;
            Ok(ClassicsRecord {
                data_parallel: hybrid::data_parallel(model, cluster, settings).map(|found| asked.record(found)),
                pipeline_only: pipeline_only.plan.map(|found| asked.record(found)),
                pipeline_only_stopped: pipeline_only.stopped.map(name_of),
            })
        };
        if time_limit_s == Some(0.0) {
            // Without any time there is no search. The plan with a single stage needs no cuts and is still evaluated.
            return self.answer_at(py, settings, &control, one_stage, classics);
        }
        self.answer(py, settings, &control, None, false, classics)
    }

    /// Returns the plan that exceeds the devices' memory by the least.
    fn closest(&self, py: Python<'_>, settings: SettingsRecord, time_limit_s: Option<f64>) -> PyResult<PlanRecord> {
        self.answer(py, settings, &control_of(time_limit_s), None, false, |asked| {
            Ok(asked.record(hybrid::closest(asked.model, &self.cluster, asked.settings, asked.control)?))
        })
    }

    /// Returns the plan that exceeds the devices' memory by the least, if a short search finds one. The flags state which
    /// changes of `hybrid::helpful_changes` let some plan fit. The caller must know that no plan fits.
    fn shortage(&self, py: Python<'_>, settings: SettingsRecord) -> PyResult<(Option<PlanRecord>, Vec<bool>)> {
        // One order of the layers explains a shortage of memory as well as all cuts, and takes a fraction of the time.
        self.answer_at(
            py,
            settings,
            &Control::default(),
            |graph| CutPoints::of(graph, 0),
            |asked| {
                let Problem { model, cluster, settings } = asked.problem();
                let closest = hybrid::closest_in_short(model, cluster, settings).ok();
                let helps = hybrid::helpful_changes(model, cluster, settings, asked.control)?;
                Ok((closest.map(|found| asked.record(found)), helps))
            },
        )
    }

    /// Whether a plan fits the devices' memory. False if none is found before the deadline.
    fn fits(&self, py: Python<'_>, settings: SettingsRecord, time_limit_s: Option<f64>) -> PyResult<bool> {
        self.answer(py, settings, &control_of(time_limit_s), None, false, |asked| {
            match hybrid::fitting(asked.model, &self.cluster, asked.settings, asked.control) {
                Ok(_) => Ok(true),
                Err(Error::Infeasible { .. } | Error::TimedOut { .. } | Error::Cancelled) => Ok(false),
                Err(other) => Err(other),
            }
        })
    }

    /// Whether no plan fits the devices' memory under some schedules, proven by `hybrid::nothing_fits`.
    fn nothing_fits(
        &self,
        py: Python<'_>,
        settings: SettingsRecord,
        warms_up: bool,
        one_stage_a_device: bool,
        time_limit_s: Option<f64>,
    ) -> PyResult<bool> {
        let schedules = Schedules { warms_up, one_stage_a_device };
        let control = control_of(time_limit_s);
        let settings = settings.settings();
        watched(py, &control, None, false, || {
            let whole;
            let is_listed = self.cuts.get().is_some() || self.parts.is_some();
            // Several virtual stages per device have conditions on layers only, not on cuts. And if no plan fits with
            // any cuts, the plan of a single stage does not fit either, so the model without cuts gives this answer.
            let needs_no_cuts =
                !is_listed && (!one_stage_a_device || self.fits_nowhere(&settings, schedules, &control)?);
            let model = if needs_no_cuts {
                whole = self.sums(&one_stage(&self.graph)?);
                &whole
            } else {
                &self.cuts(&control)?.1
            };
            hybrid::nothing_fits(model, &self.cluster, &settings, schedules, &control)
        })
    }

    /// Returns the best of all plans of a small problem, each simulated, and the number of plans.
    fn exhaustive(&self, py: Python<'_>, settings: SettingsRecord) -> PyResult<(PlanRecord, u64)> {
        self.answer(py, settings, &Control::default(), None, false, |asked| {
            let (plan, evaluated, plans) =
                hybrid::exhaustive(asked.model, &self.cluster, asked.settings, asked.control)?;
            Ok((asked.record((plan, evaluated)), plans))
        })
    }

    /// Returns the costs of a plan that is given as layers and devices of each stage, under the schedule of the
    /// settings. If neither `max_in_flights` nor `schedule` is given, the function chooses the micro-batches in flight
    /// or the action lists.
    #[pyo3(signature = (settings, stages, max_in_flights=None, schedule=None, recompute=None))]
    fn evaluate(
        &self,
        py: Python<'_>,
        settings: SettingsRecord,
        stages: Vec<(Vec<usize>, Vec<u32>)>,
        max_in_flights: Option<Vec<u32>>,
        schedule: Option<Record<'_>>,
        recompute: Option<Vec<bool>>,
    ) -> PyResult<PlanRecord> {
        let schedule = schedule.map(|schedule| schedule.to_schedule());
        let evaluated = py.detach(|| {
            let (layers, devices): (Vec<_>, Vec<_>) = stages.into_iter().unzip();
            let name = settings.schedule.clone();
            let settings = settings.settings();
            if let Some(schedule) = schedule {
                let (schedule, is_checked) = schedule?;
                if !is_checked {
                    schedule.validate()?;
                }
                let recompute = recompute.unwrap_or_else(|| vec![false; devices.len()]);
                return self.ordered(&settings, layers, devices, &schedule, recompute);
            }
            let states = CutPoints::between(&self.graph, &layers)?;
            let model = self.sums(&states);
            let control = Control::default();
            let asked = Asked { session: self, states: &states, model: &model, settings: &settings, control: &control };
            if !action_lists::CERTIFIED.iter().any(|(certified, _)| *certified == name) {
                let (size, schedule, run) = action_lists::fastest(&model, &self.cluster, &settings, &devices, &name)?;
                return Ok(run_record(&states, size, devices, run, &schedule));
            }
            Ok(asked.record(match max_in_flights {
                None => hybrid::evaluate(&model, &self.cluster, &settings, &devices)?,
                Some(max_in_flights) => {
                    let recompute = recompute.unwrap_or_else(|| vec![false; devices.len()]);
                    hybrid::evaluate_in_flight(&model, &self.cluster, &settings, &devices, &max_in_flights, &recompute)?
                }
            }))
        });
        evaluated.map_err(|error| to_py_err(py, &error))
    }

    /// Evaluates the same stages like `evaluate`, for several micro-batch sizes and values of recomputation, or with
    /// given micro-batches in flight and recomputation of each stage. An entry is `None` where the replicas of a stage can't share the
    /// micro-batch.
    fn evaluate_each(
        &self,
        py: Python<'_>,
        settings: SettingsRecord,
        stages: Vec<(Vec<usize>, Vec<u32>)>,
        each: Vec<Variant>,
    ) -> PyResult<Vec<Option<PlanRecord>>> {
        let is_by_stage = settings.recompute_by_stage;
        let settings = settings.settings();
        let evaluated = py.detach(|| {
            let (layers, devices): (Vec<_>, Vec<_>) = stages.into_iter().unzip();
            let states = CutPoints::between(&self.graph, &layers)?;
            let model = self.sums(&states);
            let control = Control::default();
            let one = |(size, allowed, given): Variant| {
                let recompute = recompute_choices(&allowed, is_by_stage);
                let settings = Settings { pipeline_micro_batch_sizes: vec![size], recompute, ..settings.clone() };
                let asked =
                    Asked { session: self, states: &states, model: &model, settings: &settings, control: &control };
                let cluster = &self.cluster;
                let found = match given {
                    None => hybrid::evaluate(&model, cluster, &settings, &devices),
                    Some((max_in_flights, recompute)) => {
                        hybrid::evaluate_in_flight(&model, cluster, &settings, &devices, &max_in_flights, &recompute)
                    }
                };
                let mut record = asked.record(found.ok()?);
                // A candidate plan only counts devices per node and numbers them again. Keep the caller's numbers.
                record.stages.iter_mut().zip(&devices).for_each(|(stage, devices)| stage.devices.clone_from(devices));
                Some(record)
            };
            Ok(each.into_iter().map(one).collect())
        });
        evaluated.map_err(|error: Error| to_py_err(py, &error))
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("ONE_STAGE", action_lists::ONE_STAGE)?;
    module.add("FRUGAL", action_lists::FRUGAL)?;
    module
        .add("VIRTUAL_STAGES", action_lists::VIRTUAL_STAGES.map(|(name, stages)| (name, stages.to_vec())).to_vec())?;
    module.add_class::<Session>()
}
