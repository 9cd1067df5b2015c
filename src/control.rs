//! How a caller watches long work and stops it. No Python in sight: the border and plain Rust use it alike.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::Error;

/// What a search knows about itself while it runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Objective of the best answer so far; infinite before there is one.
    pub best_s: f64,
    /// No answer can be below this.
    pub lower_bound_s: f64,
}

impl Default for Progress {
    fn default() -> Self {
        Self { best_s: f64::INFINITY, lower_bound_s: 0.0 }
    }
}

/// Why work ended before it had proved its answer the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// Its time was up.
    Deadline,
    /// Somebody asked it to stop.
    Interrupt,
    /// More would take unreasonable effort.
    Effort,
}

/// What a part of a search tells whoever watches the whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reports {
    /// Its best answer and its bound.
    #[default]
    All,
    /// Its best answer, if that is the best of all parts. Its bound is about this part alone.
    Best,
    /// Nothing: its answers are not those of the whole.
    Nothing,
}

/// Shared between the thread that searches and the one that waits for it.
#[derive(Debug, Default)]
pub struct Control {
    cancelled: Arc<AtomicBool>,
    deadline: Option<Instant>,
    progress: Arc<Mutex<Progress>>,
    reports: Reports,
}

impl Control {
    /// A control that stops the work `limit` from now, or never.
    #[must_use]
    pub fn with_deadline(limit: Option<Duration>) -> Self {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        Self { deadline, ..Self::default() }
    }

    /// The control of a part of this work, which may take this share of the time that is left.
    #[must_use]
    pub fn part(&self, share: f64, reports: Reports) -> Self {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()).mul_f64(share));
        Self {
            cancelled: Arc::clone(&self.cancelled),
            deadline: left.and_then(|left| Instant::now().checked_add(left)),
            progress: Arc::clone(&self.progress),
            reports,
        }
    }

    /// Asks the work to stop at its next check.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether somebody asked to stop (the deadline doesn't count).
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Whether the work should return what it has: cancelled, or past its deadline.
    #[must_use]
    pub fn should_stop(&self) -> bool {
        self.stopped().is_some()
    }

    /// Why the work should return what it has, if it should; an interrupt counts before a deadline.
    #[must_use]
    pub fn stopped(&self) -> Option<Stopped> {
        if self.is_cancelled() {
            return Some(Stopped::Interrupt);
        }
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline).then_some(Stopped::Deadline)
    }

    /// For work that has nothing to return before its end.
    ///
    /// # Errors
    /// [`Error::TimedOut`] or [`Error::Cancelled`] if it should stop.
    pub fn check(&self) -> crate::error::Result<()> {
        if self.should_stop() { Err(self.error()) } else { Ok(()) }
    }

    /// The error of work that was stopped before it had anything to return.
    #[must_use]
    pub fn error(&self) -> Error {
        if self.deadline.is_some() && !self.is_cancelled() {
            Error::TimedOut { known: String::new() }
        } else {
            Error::Cancelled
        }
    }

    /// Says how far the work is.
    pub fn report(&self, progress: Progress) {
        let mut shown = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        match self.reports {
            Reports::All => *shown = progress,
            Reports::Best => shown.best_s = shown.best_s.min(progress.best_s),
            Reports::Nothing => {}
        }
    }

    /// How far the work is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
