//! From kernel events on numbered directories to changes with names. Pure.

use std::collections::{HashMap, HashSet};

use rustix::fs::inotify::ReadFlags;
use wire::filesystem::EventType;

/// One event as the kernel tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Raw {
    /// Number of the watched directory.
    pub directory: i32,
    pub flags: ReadFlags,
    /// Name in that directory; none for the directory itself.
    pub name: Option<String>,
}

/// What follows from an event, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    Tell {
        name: String,
        change: EventType,
    },
    /// Watch this new directory. With *announce*, what is in it already is new too.
    Enter {
        name: String,
        announce: bool,
    },
    /// Stop watching this directory and all below it.
    Leave {
        name: String,
    },
    /// The kernel threw events away.
    Lost,
}

/// Which directory each number stands for, relative to the watched one.
#[derive(Default)]
pub(super) struct Tree {
    recursive: bool,
    names: HashMap<i32, String>,
    /// Entries found while entering a directory, whose own events may be in the queue already.
    announced: HashSet<String>,
    /// The same, from before the last time the queue was read to its end.
    settling: HashSet<String>,
}

const ROOT: &str = "";

impl Tree {
    pub(super) fn new(recursive: bool) -> Self {
        Self { recursive, ..Self::default() }
    }

    pub(super) fn enter(&mut self, directory: i32, name: String) {
        self.names.insert(directory, name);
    }

    pub(super) fn announce(&mut self, name: String) {
        self.announced.insert(name);
    }

    /// To be called after what was read up to the end of the queue has been handled.
    ///
    /// Events of entries announced since then may have come to the queue after it was read.
    pub(super) fn settle(&mut self) {
        self.settling = std::mem::take(&mut self.announced);
    }

    /// Forgets the directory *name* and all below it, and gives their numbers.
    pub(super) fn leave(&mut self, name: &str) -> Vec<i32> {
        let below = format!("{name}/");
        let numbers: Vec<i32> =
            self.names.iter().filter(|(_, n)| *n == name || n.starts_with(&below)).map(|(number, _)| *number).collect();
        for number in &numbers {
            self.names.remove(number);
        }
        numbers
    }

    pub(super) fn steps(&mut self, raw: &Raw) -> Vec<Step> {
        if raw.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return vec![Step::Lost];
        }
        let Some(parent) = self.names.get(&raw.directory).cloned() else { return Vec::new() };
        if raw.flags.contains(ReadFlags::IGNORED) {
            self.names.remove(&raw.directory);
            return Vec::new();
        }
        let Some(child) = &raw.name else { return Self::of_itself(&parent, raw.flags) };
        let name = if parent == ROOT { child.clone() } else { format!("{parent}/{child}") };
        let is_directory = self.recursive && raw.flags.contains(ReadFlags::ISDIR);
        let tell = |change| Step::Tell { name: name.clone(), change };
        if raw.flags.contains(ReadFlags::CREATE) {
            if self.announced.remove(&name) || self.settling.remove(&name) {
                return Vec::new();
            }
            let mut steps = vec![tell(EventType::Create)];
            steps.extend(is_directory.then_some(Step::Enter { name, announce: true }));
            return steps;
        }
        if raw.flags.contains(ReadFlags::MOVED_TO) {
            let mut steps = vec![tell(EventType::Create)];
            steps.extend(is_directory.then_some(Step::Enter { name, announce: false }));
            return steps;
        }
        if raw.flags.contains(ReadFlags::MOVED_FROM) {
            let mut steps = vec![tell(EventType::Rename)];
            steps.extend(is_directory.then_some(Step::Leave { name }));
            return steps;
        }
        let change = if raw.flags.contains(ReadFlags::DELETE) {
            EventType::Remove
        } else if raw.flags.contains(ReadFlags::MODIFY) {
            EventType::Write
        } else if raw.flags.contains(ReadFlags::ATTRIB) {
            EventType::Chmod
        } else {
            return Vec::new();
        };
        vec![tell(change)]
    }

    /// Only the watched directory itself: one below it is told about by its parent.
    fn of_itself(name: &str, flags: ReadFlags) -> Vec<Step> {
        if name != ROOT {
            return Vec::new();
        }
        let change = if flags.contains(ReadFlags::DELETE_SELF) {
            EventType::Remove
        } else if flags.contains(ReadFlags::MOVE_SELF) {
            EventType::Rename
        } else if flags.contains(ReadFlags::ATTRIB) {
            EventType::Chmod
        } else {
            return Vec::new();
        };
        vec![Step::Tell { name: ".".to_owned(), change }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(directory: i32, flags: ReadFlags, name: &str) -> Raw {
        Raw { directory, flags, name: (!name.is_empty()).then(|| name.to_owned()) }
    }

    fn tell(name: &str, change: EventType) -> Step {
        Step::Tell { name: name.into(), change }
    }

    #[test]
    fn each_kernel_event_has_its_word() {
        let mut tree = Tree::new(false);
        tree.enter(1, String::new());
        for (flags, change) in [
            (ReadFlags::CREATE, EventType::Create),
            (ReadFlags::MODIFY, EventType::Write),
            (ReadFlags::DELETE, EventType::Remove),
            (ReadFlags::MOVED_FROM, EventType::Rename),
            (ReadFlags::MOVED_TO, EventType::Create),
            (ReadFlags::ATTRIB, EventType::Chmod),
        ] {
            assert_eq!(tree.steps(&raw(1, flags, "a")), [tell("a", change)]);
        }
        assert_eq!(tree.steps(&raw(1, ReadFlags::CREATE | ReadFlags::ISDIR, "d")), [tell("d", EventType::Create)]);
        assert_eq!(tree.steps(&raw(7, ReadFlags::CREATE, "a")), []);
        assert_eq!(tree.steps(&raw(-1, ReadFlags::QUEUE_OVERFLOW, "")), [Step::Lost]);
    }

    #[test]
    fn a_new_directory_is_entered_and_what_was_found_in_it_is_told_once() {
        let mut tree = Tree::new(true);
        tree.enter(1, String::new());
        let made = tree.steps(&raw(1, ReadFlags::CREATE | ReadFlags::ISDIR, "d"));
        assert_eq!(made, [tell("d", EventType::Create), Step::Enter { name: "d".into(), announce: true }]);
        tree.enter(2, "d".into());
        tree.announce("d/x".into());
        assert_eq!(tree.steps(&raw(2, ReadFlags::CREATE, "x")), []);
        assert_eq!(tree.steps(&raw(2, ReadFlags::MODIFY, "x")), [tell("d/x", EventType::Write)]);
        tree.announce("d/y".into());
        tree.announce("d/z".into());
        tree.settle();
        assert_eq!(tree.steps(&raw(2, ReadFlags::CREATE, "z")), []);
        tree.settle();
        assert_eq!(tree.steps(&raw(2, ReadFlags::CREATE, "y")), [tell("d/y", EventType::Create)]);
    }

    #[test]
    fn a_directory_that_moves_away_is_left_with_all_below_it() {
        let mut tree = Tree::new(true);
        for (number, name) in [(1, ""), (2, "d"), (3, "d/e"), (4, "dd")] {
            tree.enter(number, name.into());
        }
        let moved = tree.steps(&raw(1, ReadFlags::MOVED_FROM | ReadFlags::ISDIR, "d"));
        assert_eq!(moved, [tell("d", EventType::Rename), Step::Leave { name: "d".into() }]);
        let mut left = tree.leave("d");
        left.sort_unstable();
        assert_eq!(left, [2, 3]);
        assert_eq!(tree.steps(&raw(3, ReadFlags::CREATE, "x")), []);
        assert_eq!(tree.steps(&raw(4, ReadFlags::CREATE, "x")), [tell("dd/x", EventType::Create)]);
    }

    #[test]
    fn the_end_of_the_watched_directory_is_told_with_a_dot() {
        let mut tree = Tree::new(true);
        tree.enter(1, String::new());
        tree.enter(2, "d".into());
        assert_eq!(tree.steps(&raw(2, ReadFlags::DELETE_SELF, "")), []);
        assert_eq!(tree.steps(&raw(1, ReadFlags::DELETE_SELF, "")), [tell(".", EventType::Remove)]);
        assert_eq!(tree.steps(&raw(1, ReadFlags::IGNORED, "")), []);
        assert_eq!(tree.steps(&raw(1, ReadFlags::CREATE, "a")), []);
    }
}
