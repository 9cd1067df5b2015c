//! Labels of a pass: suffixes of the pipeline, and which of them are still of use.

use crate::planner::effort::{passes, work};
use crate::planner::hybrid::bounds::paths::Paths;
use rustc_hash::FxHashMap;

/// A suffix of the pipeline.
#[derive(Debug, Clone)]
pub(crate) struct Label {
    /// Lengths of its paths.
    pub paths: Paths,
    /// No plan that ends in it has a shorter step.
    pub bound_s: f64,
    /// Where it begins.
    pub cut: u32,
    /// Of the machines, with its stages placed.
    pub situation: u32,
    /// How many it has.
    pub stages: u32,
    /// Of its first stage: it may have any window between these.
    pub least_window: u32,
    pub window: u32,
    /// The label it was made from, and the index of the move that made it.
    pub parent: u32,
    pub move_index: u32,
}

/// `(situation, stages, windows)`: labels that agree in these compete.
type Bucket = (u32, u32, (u32, u32));

/// Labels of a pass; those still of use are in `waiting` and `complete`.
pub(crate) struct Labels {
    /// In the order in which they were made.
    pub all: Vec<Label>,
    /// By cut.
    pub waiting: Vec<FxHashMap<Bucket, Vec<u32>>>,
    /// Whole plans.
    pub complete: Vec<u32>,
    micro_batches: u32,
    /// What holding them against each other took, in nanoseconds or so.
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

    /// Takes a label in, unless a rival has no longer paths; rivals with longer ones go.
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
            .entry((label.situation, label.stages, (label.least_window, label.window)))
            .or_default();
        self.work += work::COMPARE_LABELS * rivals.len() as u64;
        if rivals.iter().any(|&rival| self.all[rival as usize].paths.dominates(&label.paths, count)) {
            return;
        }
        rivals.retain(|&rival| !label.paths.dominates(&self.all[rival as usize].paths, count));
        rivals.push(id);
        self.all.push(label);
    }

    /// Most promising first; equal ones in the order in which they were made.
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
