//! Which file of a crate needs which: an arrow goes from a file to the one that defines what it names.
//!
//! A module and those inside of it are one thing, of which the tree of modules is the shape: what a module names
//! of its own inner modules is no arrow. What these name of it is one.

use super::modules::{Module, Modules, Name, is_test};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use syn::visit::{self, Visit};

/// For each file those that it needs, and by which names.
pub type Arrows = BTreeMap<PathBuf, BTreeMap<PathBuf, BTreeSet<String>>>;

/// The arrows between the files of a crate.
pub fn of(modules: &Modules) -> Arrows {
    let mut arrows = Arrows::new();
    for (name, module) in modules {
        let mut paths = Paths::default();
        module.items.iter().for_each(|item| paths.visit_item(item));
        let imported = module.uses.iter().map(|used| used.path.clone());
        for path in imported.chain(paths.0) {
            let Some(found) = find(modules, name, &path, &mut BTreeSet::new()) else { continue };
            if found.file != module.file && !is_inside(modules, name, found) {
                let needs = arrows.entry(module.file.clone()).or_default();
                needs.entry(found.file.clone()).or_default().insert(path.join("::"));
            }
        }
    }
    arrows
}

/// Whether the file of `found` holds a module inside of `name`.
fn is_inside(modules: &Modules, name: &Name, found: &Module) -> bool {
    let mut of_file = modules.iter().filter(|(_, module)| module.file == found.file);
    of_file.any(|(other, _)| other.len() > name.len() && other.starts_with(name))
}

/// The module that defines what `path`, written in the module `from`, names; `None` for another crate's.
fn find<'a>(
    modules: &'a Modules,
    from: &Name,
    path: &[String],
    seen: &mut BTreeSet<(Name, String)>,
) -> Option<&'a Module> {
    let mut at = from.clone();
    let mut rest = path;
    let (first, others) = path.split_first()?;
    match first.as_str() {
        "crate" => (at, rest) = (Name::new(), others),
        "self" => rest = others,
        "super" => {
            while let Some(("super", others)) = rest.split_first().map(|(s, o)| (s.as_str(), o)) {
                at.pop();
                rest = others;
            }
        }
        _ if is_module(modules, &at, first) => {}
        _ => return None,
    }
    while let Some((segment, others)) = rest.split_first()
        && is_module(modules, &at, segment)
    {
        at.push(segment.clone());
        rest = others;
    }
    let module = modules.get(&at)?;
    let Some(name) = rest.first().filter(|name| *name != "*") else { return Some(module) };
    if module.defined.contains(name) || !seen.insert((at.clone(), name.clone())) {
        return Some(module);
    }
    let handed_on = module.uses.iter().filter(|used| used.name == *name || used.name == "*");
    for used in handed_on {
        let mut path = used.path.clone();
        if used.name == "*" {
            path.pop();
            path.push(name.clone());
        }
        if let Some(found) = find(modules, &at, &path, seen)
            && (used.name != "*" || found.defined.contains(name))
        {
            return Some(found);
        }
    }
    Some(module)
}

fn is_module(modules: &Modules, above: &Name, segment: &str) -> bool {
    let mut name = above.clone();
    name.push(segment.to_owned());
    modules.contains_key(&name)
}

/// Gathers the paths of code, tests left out, that begin at the crate or at a module above.
#[derive(Default)]
struct Paths(Vec<Vec<String>>);

impl<'a> Visit<'a> for Paths {
    fn visit_path(&mut self, path: &'a syn::Path) {
        let segments: Vec<_> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        if segments.first().is_some_and(|first| first == "crate" || first == "super") {
            self.0.push(segments);
        }
        visit::visit_path(self, path);
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }
}
