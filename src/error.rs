//! What can go wrong, one variant for each thing a user can act on.
//!
//! The message says what is wrong with which numbers; [`Error::hint`] says what to do about it.

/// Result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A request that can't be met, or that makes no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The layer graph is not usable: a cycle, an unknown node, a number out of range.
    #[error("{message}")]
    Profile {
        /// What is wrong, naming layer and number.
        message: String,
        /// The way out.
        hint: String,
    },
    /// The description of machines, devices or links is not usable.
    #[error("{message}")]
    Cluster {
        /// What is wrong, naming machine and number.
        message: String,
        /// The way out.
        hint: String,
    },
    /// An argument is out of its range or contradicts another.
    #[error("{message}")]
    Argument {
        /// What is wrong, naming the argument and its value.
        message: String,
        /// The way out.
        hint: String,
    },
    /// The question is well-formed but nothing satisfies it.
    #[error("{message}")]
    Infeasible {
        /// What is short, where and by how much.
        message: String,
        /// The nearest change that would help.
        hint: String,
    },
    /// A schedule is not executable: incomplete, on a wrong rank, or deadlocked.
    #[error("{message}")]
    Schedule {
        /// The first wrong action, or the cycle of waiting ones.
        message: String,
        /// The way out.
        hint: String,
    },
    /// The deadline came before there was anything to return.
    #[error("the time was up before there was any plan{known}")]
    TimedOut {
        /// What is known of all plans nevertheless, as the end of the sentence, or nothing.
        known: String,
    },
    /// The caller asked to stop before there was anything to return.
    #[error("stopped before an answer was found")]
    Cancelled,
}

impl Error {
    /// What the user can do about it; empty where nothing more can be said.
    #[must_use]
    pub fn hint(&self) -> &str {
        match self {
            Self::Profile { hint, .. }
            | Self::Cluster { hint, .. }
            | Self::Argument { hint, .. }
            | Self::Infeasible { hint, .. }
            | Self::Schedule { hint, .. } => hint,
            Self::TimedOut { .. } | Self::Cancelled => "give it more time",
        }
    }

    /// An [`Error::Profile`] from its two sentences.
    pub fn profile(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Profile { message: message.into(), hint: hint.into() }
    }

    /// An [`Error::Cluster`] from its two sentences.
    pub fn cluster(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Cluster { message: message.into(), hint: hint.into() }
    }

    /// An [`Error::Argument`] from its two sentences.
    pub fn argument(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Argument { message: message.into(), hint: hint.into() }
    }

    /// An [`Error::Infeasible`] from its two sentences.
    pub fn infeasible(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Infeasible { message: message.into(), hint: hint.into() }
    }

    /// An [`Error::Schedule`] from its two sentences.
    pub fn schedule(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Schedule { message: message.into(), hint: hint.into() }
    }
}
