import my_kernel

# <class>
from identity_conv.testing import check_class, check_op, close
# </class>
# <not class>
from identity_conv.testing import check_op, close
# </not class>


def test_equals_its_reference():
    check_op(
        my_kernel.ops.my_kernel,
        my_kernel.ops.reference,
        compare=close(),
        # <not backward>
        skip={"grad": "for inference"},
        # </not backward>
    )


# <class>
def test_class_equals_the_reference():
    check_class(
        my_kernel.classes.MyKernel,
        "forward",
        lambda obj, x: my_kernel.ops.reference(x, obj.factor),
        compare=close(),
        # <not backward>
        skip={"grad": "for inference"},
        # </not backward>
    )


# </class>
