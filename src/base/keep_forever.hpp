#pragma once
// Memory that must outlive everything because something may still read it, for example a transport
// that never finished a send. It counts as held, not as lost.

#include <memory>

namespace ferry::base {

void keep_forever(std::shared_ptr<void> memory);

}  // namespace ferry::base
