//! Labels of a pass: suffixes of the pipeline, and which of them are not dominated.

use crate::planner::effort::{passes, work};
use crate::planner::hybrid::bounds::paths::Paths;
use rustc_hash::FxHashMap;

/// A suffix of the pipeline.
#[derive(Debug, Clone)]
pub(crate) struct Label {
    /// Lengths of its critical paths.
    pub paths: Paths,
    /// Lower bound on the step of plans that end in it.
    pub bound_s: f64,
    /// Cut where it begins.
    pub cut: u32,
    /// Situation of the devices, with its stages placed.
    pub situation: u32,
    /// Number of its stages.
    pub stages: u32,
    /// Range of micro-batches in flight of its first stage.
    pub min_in_flight: u32,
    pub max_in_flight: u32,
    /// Label that it was made from, and index of the move that made it.
    pub parent: u32,
    pub move_index: u32,
}

/// Labels that agree in `(situation, stages, max_in_flights)` compete.
type Bucket = (u32, u32, (u32, u32));

/// Labels of a pass. Those that are not dominated are in `waiting` and `complete`.
pub(crate) struct Labels {
    /// All labels, in the order in which they were made.
    pub all: Vec<Label>,
    /// Labels to extend, by cut.
    pub waiting: Vec<FxHashMap<Bucket, Vec<u32>>>,
    /// Labels of complete plans.
    pub complete: Vec<u32>,
    micro_batches: u32,
    /// Work of comparing labels.
    pub work: u64,
}

impl Labels {
    pub(crate) fn new(cuts: usize, micro_batches: u32) -> Self {
        Self {
            all: Vec::new(),
            waiting: vec![FxHashMap::default(); cuts],
            complete: Vec::new(),
            micro_batches,
            work: 0,
        }
    }

    /// Adds a label, unless a rival dominates it. Drops the rivals that it dominates.
    pub(crate) fn add(&mut self, label: Label) {
        let count = self.micro_batches;
        let id = self.all.len() as u32;
        if label.cut == 0 {
            self.complete.push(id);
            self.all.push(label);
            if self.complete.len() >= 16 * passes::PLANS_OF_PASS {
                self.keep_best_plans();
            }
            return;
        }
        let rivals = self.waiting[label.cut as usize]
            .entry((label.situation, label.stages, (label.min_in_flight, label.max_in_flight)))
            .or_default();
        self.work += work::COMPARE_LABELS * rivals.len() as u64;
        if rivals.iter().any(|&rival| self.all[rival as usize].paths.dominates(&label.paths, count)) {
            return;
        }
        rivals.retain(|&rival| !label.paths.dominates(&self.all[rival as usize].paths, count));
        rivals.push(id);
        self.all.push(label);
    }

    /// Sorts labels by their bound. Equal ones keep the order in which they were made.
    pub(crate) fn sort(&self, ids: &mut [u32]) {
        ids.sort_by(|&a, &b| self.all[a as usize].bound_s.total_cmp(&self.all[b as usize].bound_s).then(a.cmp(&b)));
    }

    pub(crate) fn keep_best_plans(&mut self) {
        let mut complete = std::mem::take(&mut self.complete);
        self.sort(&mut complete);
        complete.truncate(passes::PLANS_OF_PASS);
        self.complete = complete;
    }
}
